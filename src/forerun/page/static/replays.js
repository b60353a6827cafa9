// Replay: any trace file, dropped or chosen.
import { el, labelled } from './dom.js';
import { openReplay } from './replay.js';
import { emptyReplay } from './stream.js';

export function replays(panel, site) {
  const place = el('div', {});
  const file = el('input', { type: 'file', accept: '.jsonl,.json,.html,text/plain', onchange: () => file.files[0] && open(file.files[0]) });

  async function open(chosen) {
    site.fail(null);
    try {
      openReplay(traceIn(await chosen.text()), place, emptyReplay);
    } catch (error) {
      site.fail(`${chosen.name}: ${error.message}`);
    }
  }

  site.openFile = open;
  panel.append(el('h2', {}, 'Replay a trace'),
    el('div', { class: 'drop' }, el('p', {}, 'Drop a trace file anywhere on this page, or choose one. ', el('code', {}, 'forerun generate … --trace t.jsonl'), ' writes one.'), labelled('Trace file', file)), place);
}

// A trace, or the one inside a replay file.
function traceIn(content) {
  const inside = content.match(/<script type="application\/jsonl" id="trace">([\s\S]*?)<\/script>/);
  return inside ? inside[1] : content;
}

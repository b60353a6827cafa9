// The whole of a replay file: a player for the trace that stands in the page.
import { el } from './dom.js';
import { Player } from './player.js';
import { readTrace } from './trace.js';

export function openReplay(content, place, ask = null) {
  const player = new Player({ ask });
  place.replaceChildren(player.root);
  for (const line of readTrace(content)) player.push(line);
  player.finish();
  player.seek(0);
  return player;
}

const stored = document.getElementById('trace');
if (stored) {
  const place = document.getElementById('replay');
  try {
    openReplay(stored.textContent, place).toggle();
  } catch (error) {
    place.replaceChildren(el('p', { role: 'alert' }, `This trace cannot be played: ${error.message}`));
  }
}

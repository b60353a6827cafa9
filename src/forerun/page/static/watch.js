// Watch: one run, token by token.
import { el, labelled } from './dom.js';
import { MethodChoice, numberField } from './form.js';
import { Player } from './player.js';
import { Work, emptyReplay } from './stream.js';

export const EXAMPLE = 'class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self):';

export function watch(panel, site) {
  const choice = new MethodChoice(site, { method: 'speculative' });
  const prompt = el('textarea', { value: EXAMPLE, spellcheck: 'false' });
  const most = numberField('Most tokens', 96, { min: 1, max: 100000 });
  const temperature = numberField('Temperature', 0, { step: 'any' });
  const seed = numberField('Seed', 0);
  const start = el('button', { type: 'submit', class: 'main' }, 'Decode');
  const stop = el('button', { type: 'button' }, 'Stop');
  const place = el('div', {});
  const work = new Work(start, stop, site.fail);

  async function decode(event) {
    event.preventDefault();
    site.fail(null);
    const player = new Player({ live: true, ask: emptyReplay });
    place.replaceChildren(player.root);
    const run = { ...choice.request(), prompt: prompt.value, max_tokens: most.value, temperature: temperature.value, seed: seed.value };
    await work.run('/page/run', { runs: [run] }, (line) => player.push(line));
    player.finish();
  }

  panel.append(el('h2', {}, 'Watch a model decode'),
    el('form', { class: 'ask', onsubmit: decode }, labelled('Prompt', prompt),
      el('div', { class: 'fields' }, choice.fields, most.field, temperature.field, seed.field, start, stop),
      choice.summary, choice.optionsBox), place);
}

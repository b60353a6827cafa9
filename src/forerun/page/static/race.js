// Race: two to four methods on the same prompt and seed, started together.
import { el, labelled } from './dom.js';
import { MethodChoice, numberField } from './form.js';
import { Player } from './player.js';
import { Work, emptyReplay } from './stream.js';
import { EXAMPLE } from './watch.js';

const FIRST = ['ar', 'speculative', 'jacobi', 'lookup'];
const FEWEST = 2;
const MOST = 4;

export function race(panel, site) {
  const prompt = el('textarea', { value: EXAMPLE, spellcheck: 'false' });
  const most = numberField('Most tokens', 64, { min: 1, max: 100000 });
  const temperature = numberField('Temperature', 0, { step: 'any' });
  const seed = numberField('Seed', 0);
  const start = el('button', { type: 'submit', class: 'main' }, 'Start');
  const stop = el('button', { type: 'button' }, 'Stop');
  const add = el('button', { type: 'button', onclick: () => addRacer() }, 'Add a racer');
  const lanes = el('div', { class: 'racers' });
  const place = el('div', {});
  const work = new Work(start, stop, site.fail);
  const racers = [];

  function addRacer() {
    const choice = new MethodChoice(site, { method: FIRST[racers.length], withOptions: true });
    const remove = el('button', { type: 'button', onclick: () => removeRacer(racer) }, 'Remove');
    const box = el('fieldset', {}, el('legend', {}, `Racer ${racers.length + 1}`),
      el('div', { class: 'fields' }, choice.fields, remove), choice.optionsBox);
    const racer = { choice, box };
    racers.push(racer);
    lanes.append(box);
    count();
  }

  function removeRacer(racer) {
    if (racers.length <= FEWEST) return;
    racers.splice(racers.indexOf(racer), 1);
    racer.box.remove();
    count();
  }

  function count() {
    add.disabled = racers.length >= MOST;
    racers.forEach(({ box }, i) => { box.querySelector('legend').textContent = `Racer ${i + 1}`; });
  }

  async function run(event) {
    event.preventDefault();
    site.fail(null);
    const player = new Player({ live: true, ask: emptyReplay, closed: true });
    place.replaceChildren(player.root);
    const shared = { prompt: prompt.value, max_tokens: most.value, temperature: temperature.value, seed: seed.value };
    const runs = racers.map(({ choice }) => ({ ...choice.request(), ...shared }));
    await work.run('/page/run', { runs }, (line) => player.push(line));
    player.finish();
  }

  FIRST.forEach(addRacer);
  panel.append(el('h2', {}, 'Race methods against each other'),
    el('p', { class: 'quiet' }, 'All start together with the same prompt and seed. Racers on one model share its forwards, so the race is about who needs fewer of them.'),
    el('form', { class: 'ask', onsubmit: run }, labelled('Prompt', prompt), lanes,
      el('div', { class: 'fields' }, most.field, temperature.field, seed.field, add, start, stop)), place);
}

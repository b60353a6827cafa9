// Chat: a conversation whose answers show how they were found.
import { el, labelled } from './dom.js';
import { MethodChoice, numberField } from './form.js';
import { Player } from './player.js';
import { Work } from './stream.js';

export function chat(panel, site) {
  const chats = site.about.models.filter((one) => one.chats || !one.family);
  panel.append(el('h2', {}, 'Chat'));
  if (!chats.length) {
    panel.append(el('p', {}, 'None of these models has a chat template. Serve one that has: ', el('code', {}, 'forerun serve smollm'), '.'));
    return;
  }
  const choice = new MethodChoice(site, { filter: (one) => chats.includes(one), withOptions: true });
  const said = el('ol', { class: 'said', 'aria-label': 'Conversation' });
  const message = el('textarea', { rows: 2, onkeydown: (event) => { if (event.key === 'Enter' && !event.shiftKey) { event.preventDefault(); if (!work.runs) send(); } } });
  const system = el('input', { type: 'text', size: 40 });
  const most = numberField('Most tokens', 200, { min: 1, max: 100000 });
  const temperature = numberField('Temperature', 0.7, { step: 'any' });
  const seed = numberField('Seed', 0);
  const coloured = el('input', { type: 'checkbox', checked: true, onchange: () => said.classList.toggle('plain', !coloured.checked) });
  const start = el('button', { type: 'submit', class: 'main' }, 'Send');
  const stop = el('button', { type: 'button' }, 'Stop');
  const again = el('button', { type: 'button', disabled: true, onclick: () => regenerate() }, 'Regenerate');
  const fresh = el('button', { type: 'button', onclick: () => { work.stop(); messages.length = 0; said.replaceChildren(); again.disabled = true; } }, 'New conversation');
  const work = new Work(start, stop, site.fail);
  const messages = [];

  function send() {
    const content = message.value.trim();
    if (!content) return;
    message.value = '';
    messages.push({ role: 'user', content });
    said.append(el('li', { class: 'user' }, el('span', { class: 'unseen' }, 'You: '), content));
    answer();
  }

  function regenerate() {
    if (work.runs || messages.at(-1)?.role !== 'assistant') return;
    messages.pop();
    said.lastElementChild.remove();
    seed.box.value = seed.value + 1;
    answer();
  }

  async function answer() {
    site.fail(null);
    again.disabled = true;
    const player = new Player({ live: true });
    const box = el('li', { class: 'assistant' }, el('span', { class: 'unseen' }, 'Answer: '), player.root);
    said.append(box);
    const opening = system.value ? [{ role: 'system', content: system.value }] : [];
    const request = { ...choice.request(), messages: [...opening, ...messages], max_tokens: most.value, temperature: temperature.value, seed: seed.value };
    const whole = await work.run('/page/run', { runs: [request] }, (line) => {
      if (line.kind === 'start') hidePrompt(line);
      player.push(line);
    });
    player.finish();
    const run = player.panels[0]?.run;
    if (!whole && !run) {
      box.remove();
      message.value = messages.pop().content;
      said.lastElementChild.remove();
      return;
    }
    messages.push({ role: 'assistant', content: run?.text ?? '' });
    again.disabled = false;
  }

  panel.append(said, el('form', { class: 'ask', onsubmit: (event) => { event.preventDefault(); if (!work.runs) send(); } },
    labelled('Message', message),
    el('div', { class: 'fields' }, start, stop, again, fresh, labelled('Colours', coloured)),
    el('details', {}, el('summary', {}, 'Model and method'),
      el('div', { class: 'fields' }, choice.fields, most.field, temperature.field, seed.field, labelled('System message', system)),
      choice.summary, choice.optionsBox)));
}

// The template's text around the conversation is shown already.
function hidePrompt(line) {
  line.texts = line.texts.map(() => '');
}

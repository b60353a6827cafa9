// The page: its tabs, and what they share.
import { el } from './dom.js';
import { about, useKey } from './stream.js';
import { chat } from './chat.js';
import { fill } from './fill.js';
import { prove } from './prove.js';
import { race } from './race.js';
import { replays } from './replays.js';
import { watch } from './watch.js';

const TABS = { watch: ['Watch', watch], race: ['Race', race], fill: ['Fill', fill], chat: ['Chat', chat], prove: ['Compare and prove', prove], replay: ['Replay', replays] };

const message = document.getElementById('message');
const site = {
  about: null,
  fail(text) {
    message.textContent = text ?? '';
    message.hidden = !text;
  },
};
const panels = {};
const buttons = {};

function addTab(name) {
  const [label, build] = TABS[name];
  const panel = el('section', { id: `panel-${name}`, role: 'tabpanel', 'aria-labelledby': `tab-${name}`, tabindex: '-1', hidden: true });
  const button = el('button', { type: 'button', role: 'tab', id: `tab-${name}`, 'aria-controls': panel.id, onclick: () => show(name), onkeydown: (event) => step(event, name) }, label);
  panels[name] = { panel, build, built: false };
  buttons[name] = button;
  document.getElementById('tabs').append(button);
  document.getElementById('main').append(panel);
}

function show(name) {
  for (const [other, { panel }] of Object.entries(panels)) {
    const chosen = other === name;
    panel.hidden = !chosen;
    buttons[other].setAttribute('aria-selected', chosen);
    buttons[other].tabIndex = chosen ? 0 : -1;
  }
  site.fail(null);
  const tab = panels[name];
  if (!tab.built) {
    tab.built = true;
    tab.build(tab.panel, site);
  }
  if (location.hash !== `#${name}`) history.replaceState(null, '', `#${name}`);
}

function step(event, name) {
  const names = Object.keys(TABS);
  const at = names.indexOf(name);
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  const chosen = names[(next + names.length) % names.length];
  show(chosen);
  buttons[chosen].focus();
}

function takeDrops() {
  const body = document.body;
  document.addEventListener('dragover', (event) => { event.preventDefault(); body.classList.add('dragging'); });
  document.addEventListener('dragleave', () => body.classList.remove('dragging'));
  document.addEventListener('drop', (event) => {
    event.preventDefault();
    body.classList.remove('dragging');
    const [file] = event.dataTransfer.files;
    if (!file) return;
    show('replay');
    site.openFile(file);
  });
}

function switchTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
  root.dataset.theme = dark ? 'light' : 'dark';
}

// A server with a key: ask for it, once, and keep it in this page only.
function askForKey() {
  const box = el('input', { type: 'password', autocomplete: 'off', 'aria-label': 'API key' });
  const form = el('form', { class: 'fields', onsubmit: (event) => { event.preventDefault(); useKey(box.value); form.remove(); begin(); } },
    el('label', {}, 'This server needs an API key: ', box), el('button', { class: 'main' }, 'Go on'));
  document.getElementById('main').append(form);
  box.focus();
}

async function begin() {
  site.fail(null);
  try {
    site.about = await about();
  } catch (error) {
    if (error.status === 401) askForKey();
    else site.fail(`The server does not answer: ${error.message}`);
    return;
  }
  Object.keys(TABS).forEach(addTab);
  takeDrops();
  show(location.hash.slice(1) in TABS ? location.hash.slice(1) : 'watch');
  window.addEventListener('hashchange', () => location.hash.slice(1) in TABS && show(location.hash.slice(1)));
}

document.getElementById('theme').addEventListener('click', switchTheme);
begin();

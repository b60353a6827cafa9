// Compare and prove: `forerun compare` and `forerun certify`, run from here.
import { el, labelled, number, percent, svg } from './dom.js';
import { MethodChoice, choice, numberField } from './form.js';
import { Work } from './stream.js';

const COLUMNS = [
  ['method', (row) => row.method], ['guarantee', (row) => row.guarantee],
  ['tokens per forward', (row) => number(row.tokens_per_forward)],
  ['tokens/s', (row) => number(row.tokens_per_second, 0)],
  ['over its reference', (row) => (row.speedup == null ? '–' : `${number(row.speedup)} ×`)],
  ['equals reference', (row) => percent(row.equals_reference)],
  ['p-value', (row) => number(row.p_value, 3)],
  ['perplexity', (row) => number(row.perplexity, 2)], ['parses', (row) => percent(row.parses)],
  ['forwards', (row) => (row.draft_forwards ? `${row.forwards} + ${row.draft_forwards}` : row.forwards)],
];
const SIZE = { width: 640, height: 320, left: 56, right: 20, top: 16, bottom: 44 };

export function prove(panel, site) {
  panel.append(el('h2', {}, 'Compare and prove'), comparison(site), certification(site));
}

function comparison(site) {
  const models = site.about.models.filter((one) => one.family && !one.name.includes('draft'));
  const model = choice(models.map((one) => one.name), models[0]?.name, () => list());
  const boxes = el('div', { class: 'choices' });
  const draft = choice(['', ...site.about.models.map((one) => one.name)], site.about.models.some((one) => one.name === 'zoo:drafter') ? 'zoo:drafter' : '');
  draft.options[0].textContent = 'none';
  const most = numberField('Tokens each', 32, { min: 1, max: 1024 });
  const rounds = numberField('Rounds', 1, { min: 1, max: 10 });
  const temperature = numberField('Temperature', 0, { step: 'any' });
  const prompt = el('textarea', { rows: 2, placeholder: 'default: pieces of Python code' });
  const start = el('button', { type: 'submit', class: 'main' }, 'Compare');
  const stop = el('button', { type: 'button' }, 'Cancel');
  const bar = el('progress', { max: 1, value: 0, 'aria-label': 'Comparison', hidden: true });
  const place = el('div', { class: 'study' });
  const work = new Work(start, stop, site.fail);

  function list() {
    const methods = models.find((one) => one.name === model.value)?.methods ?? [];
    boxes.replaceChildren(...methods.map((name) => el('label', {}, el('input', { type: 'checkbox', value: name, checked: !needsMore(name) }), name)));
  }

  // A model that fills blanks, or a text that is expected.
  const needsMore = (name) => /^(diffusion|predicted)/.test(site.about.methods[name].drafter ?? '');

  async function run(event) {
    event.preventDefault();
    site.fail(null);
    place.replaceChildren();
    bar.hidden = false;
    bar.value = 0;
    const methods = [...boxes.querySelectorAll('input:checked')].map((box) => box.value);
    const request = { models: [model.value], methods, draft: draft.value || null, max_tokens: most.value, rounds: rounds.value, temperature: temperature.value };
    if (prompt.value.trim()) request.prompts = [prompt.value];
    await work.run('/page/compare', request, (line) => {
      if (line.kind === 'progress') bar.value = line.done / line.total;
      if (line.kind === 'error') site.fail(line.error);
      if (line.kind === 'comparison') place.replaceChildren(rowsTable(line), plot(line.rows));
    });
    bar.hidden = true;
  }

  list();
  return el('section', { 'aria-label': 'Compare' }, el('form', { class: 'ask', onsubmit: run },
    el('fieldset', {}, el('legend', {}, 'Methods to compare'), boxes), labelled('Prompt', prompt),
    el('div', { class: 'fields' }, labelled('Model', model), labelled('Draft model', draft), most.field, rounds.field, temperature.field, start, stop)), bar, place);
}

function rowsTable({ rows, machine, judge }) {
  const head = el('tr', {}, COLUMNS.map(([name]) => el('th', { scope: 'col' }, name)));
  const body = rows.map((row) => el('tr', {}, COLUMNS.map(([, value], i) => el(i ? 'td' : 'th', i ? {} : { scope: 'row' }, String(value(row))))));
  const where = typeof machine === 'string' ? machine : Object.values(machine).join(', ');
  const caption = `${rows[0].model} on ${where}${judge ? `; perplexity under ${judge}` : ''}`;
  return el('div', { class: 'wide', tabindex: '0', role: 'group', 'aria-label': 'Results' }, el('table', {}, el('caption', {}, caption), el('thead', {}, head), el('tbody', {}, body)));
}

// Tokens per forward against quality. No method on the frontier is beaten in both.
function plot(rows) {
  const byPerplexity = rows.every((row) => row.perplexity != null);
  const quality = (row) => (byPerplexity ? -row.perplexity : row.equals_reference ?? row.parses);
  const points = rows.map((row) => ({ row, x: row.tokens_per_forward, y: quality(row) }));
  const frontier = points.filter((one) => !points.some((other) => other !== one && other.x >= one.x && other.y >= one.y && (other.x > one.x || other.y > one.y)))
    .sort((a, b) => a.x - b.x);
  const [x, y] = [scale(points.map((p) => p.x), SIZE.left, SIZE.width - SIZE.right), scale(points.map((p) => p.y), SIZE.height - SIZE.bottom, SIZE.top)];
  const label = byPerplexity ? 'perplexity (better is up)' : 'equals its reference (better is up)';
  const shown = (value) => (byPerplexity ? number(-value, 1) : percent(value));
  const words = frontier.map(({ row }) => row.method).join(', ');
  return el('figure', {}, svg('svg', { class: 'plot', viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, role: 'img', 'aria-label': `Tokens per forward against quality. On the frontier: ${words}` },
    svg('line', { class: 'axis', x1: SIZE.left, x2: SIZE.width - SIZE.right, y1: SIZE.height - SIZE.bottom, y2: SIZE.height - SIZE.bottom }),
    svg('line', { class: 'axis', x1: SIZE.left, x2: SIZE.left, y1: SIZE.top, y2: SIZE.height - SIZE.bottom }),
    svg('text', { x: SIZE.width / 2, y: SIZE.height - 8, 'text-anchor': 'middle' }, 'tokens per forward'),
    svg('text', { x: 14, y: SIZE.height / 2, 'text-anchor': 'middle', transform: `rotate(-90 14 ${SIZE.height / 2})` }, label),
    [x.low, x.high].map((value) => svg('text', { x: x(value), y: SIZE.height - SIZE.bottom + 16, 'text-anchor': 'middle' }, number(value, 1))),
    [y.low, y.high].map((value) => svg('text', { x: SIZE.left - 4, y: y(value) + 4, 'text-anchor': 'end' }, shown(value))),
    svg('polyline', { class: 'frontier', points: frontier.map((p) => `${x(p.x)},${y(p.y)}`).join(' ') }),
    points.map((p) => svg('circle', { class: p.row.guarantee, cx: x(p.x), cy: y(p.y), r: 5 })),
    labels(points, x, y),
  ), el('figcaption', { class: 'quiet' }, `Filled: exact. Hollow: approximate. On the frontier: ${words}.`));
}

// Names beside their points; points that lie on each other share a line.
function labels(points, x, y) {
  const byPlace = new Map();
  for (const point of points) {
    const place = [x(point.x), y(point.y)].map((value) => Math.round(value / 12)).join();
    byPlace.set(place, [...(byPlace.get(place) ?? []), point]);
  }
  return [...byPlace.values()].map((some) => {
    const [at, height] = [x(some[0].x), y(some[0].y)];
    const right = at > SIZE.width * 0.6;
    return svg('text', { x: right ? at - 8 : at + 8, y: height - 8, 'text-anchor': right ? 'end' : 'start' },
      some.map(({ row }) => row.method).join(', '));
  });
}

function scale(values, from, to) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const room = (most - least) * 0.1 || Math.abs(most) * 0.1 || 1;
  const [low, high] = [least - room, most + room];
  const place = (value) => from + ((value - low) / (high - low)) * (to - from);
  return Object.assign(place, { low: least, high: most });
}

function certification(site) {
  const chosen = new MethodChoice(site, { method: 'speculative', withOptions: false });
  const how = choice(['enumerate', 'test'], 'enumerate', () => show());
  how.options[0].textContent = 'enumerate every outcome, on table models';
  how.options[1].textContent = 'test on the model';
  const temperature = numberField('Temperature', 1, { step: 'any' });
  const sequences = numberField('Most sequences', 100, { min: 1, max: 2000 });
  const start = el('button', { type: 'submit', class: 'main' }, 'Certify');
  const stop = el('button', { type: 'button' }, 'Cancel');
  const bar = el('progress', { max: 1, value: 0, 'aria-label': 'Certification', hidden: true });
  const place = el('div', { class: 'study', 'aria-live': 'polite' });
  const work = new Work(start, stop, site.fail);

  function show() {
    const tests = how.value === 'test';
    temperature.field.hidden = !tests;
    sequences.field.hidden = !tests;
  }

  async function run(event) {
    event.preventDefault();
    site.fail(null);
    place.replaceChildren();
    bar.hidden = false;
    bar.value = 0;
    const { model, forerun: { method, draft } } = chosen.request();
    const request = how.value === 'test' ? { method, model, draft, temperature: temperature.value, max_sequences: sequences.value } : { method };
    await work.run('/page/certify', request, (line) => {
      if (line.kind === 'error') site.fail(line.error);
      if (line.kind === 'progress') bar.value = line.done / line.total;
      if (line.kind === 'evidence') { bar.value = line.sequences / sequences.value; place.replaceChildren(verdictOf(line, true)); }
      if (line.kind === 'verdict') place.replaceChildren(verdictOf(line, false));
      if (line.kind === 'certificate') place.replaceChildren(certificateOf(line));
    });
    bar.hidden = true;
  }

  show();
  return el('section', { 'aria-label': 'Certify' }, el('form', { class: 'ask', onsubmit: run }, el('fieldset', {}, el('legend', {}, 'Certify that a method keeps its reference’s law'),
    el('div', { class: 'fields' }, labelled('How', how), chosen.fields, temperature.field, sequences.field, start, stop), chosen.summary)), bar, place);
}

function certificateOf({ method, verdict, cases, limit }) {
  const worst = [...cases].sort((a, b) => b.distance - a.distance).slice(0, 8);
  return el('div', {}, el('p', {}, `${method}: `, el('b', { class: verdict }, verdict),
    `. ${cases.length} table models and parameters enumerated; limit ${limit.toExponential(0)}.`),
  el('div', { class: 'wide', tabindex: '0', role: 'group', 'aria-label': 'Cases' }, el('table', {}, el('caption', {}, 'The largest differences in total variation'),
    el('thead', {}, el('tr', {}, el('th', { scope: 'col' }, 'case'), el('th', { scope: 'col' }, 'distance'))),
    el('tbody', {}, worst.map((one) => el('tr', {}, el('th', { scope: 'row' }, String(one.case)), el('td', {}, one.distance.toExponential(1))))))));
}

function verdictOf(found, running) {
  const faults = Object.entries(found.power).map(([fault, power]) => {
    const cell = el('td', { class: 'meter' }, percent(power, 1));
    cell.style.setProperty('--part', power);
    return el('tr', {}, el('th', { scope: 'row' }, fault), cell);
  });
  return el('div', {}, el('p', {}, `${found.method} on ${found.model}: `, running ? 'testing' : el('b', { class: found.verdict }, found.verdict),
    `. ${found.tokens} tokens in ${found.sequences} sequences; evidence against it ${found.evidence.toPrecision(3)}, refuted above ${number(1 / found.alpha, 0)}.`),
  faults.length ? el('table', {}, el('caption', {}, 'Chance that a fault would have been caught by now'), el('tbody', {}, faults)) : null,
  found.differences?.length ? el('p', {}, `${found.differences.length} places differ, ${found.differences.filter((one) => one.explained).length} within rounding.`) : null);
}

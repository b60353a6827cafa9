// Choosing a model, a method and its options. What there is comes from the server.
import { el, labelled } from './dom.js';
import { loadModel } from './stream.js';

const NO_CHOICE = '';

export class MethodChoice {
  constructor(site, { filter = () => true, method = null, model = null, withOptions = true } = {}) {
    this.site = site;
    this.filter = filter;
    this.withOptions = withOptions;
    this.wanted = method;
    const names = site.about.models.filter(filter).map((one) => one.name);
    this.modelChoice = choice(names, model ?? names[0], () => this.showModel());
    this.methodChoice = choice([], null, () => this.showMethod());
    this.draftChoice = choice([], null);
    this.draftField = labelled('Draft model', this.draftChoice);
    this.options = el('div', { class: 'fields' });
    this.optionsBox = el('details', {}, el('summary', {}, 'Options of the method'), this.options);
    this.summary = el('p', { class: 'quiet' });
    this.fields = [labelled('Model', this.modelChoice), labelled('Method', this.methodChoice), this.draftField];
    this.showModel();
  }

  get model() {
    return this.site.about.models.find((one) => one.name === this.modelChoice.value);
  }

  async showModel() {
    if (this.model && !this.model.family) {
      try {
        this.site.about = await loadModel(this.model.name);
      } catch (error) {
        this.site.fail(error.message);
        return;
      }
    }
    const methods = this.model?.methods ?? [];
    const kept = [this.methodChoice.value, this.wanted, this.model?.default].find((name) => methods.includes(name));
    refill(this.methodChoice, methods, kept);
    this.showMethod();
  }

  showMethod() {
    const method = this.site.about.methods[this.methodChoice.value];
    if (!method) return;
    const { drafts, needed } = this.possibleDrafts(method);
    refill(this.draftChoice, drafts, needed ? drafts[0] : NO_CHOICE);
    this.draftField.hidden = drafts.length === 0;
    this.summary.textContent = `${method.summary} ${method.guarantee === 'exact' ? `Exact: the law of ${method.reference}.` : `Approximate: ${method.reason}.`}`;
    this.inputs = Object.entries(method.options).map(([name, option]) => optionInput(name, option));
    this.options.replaceChildren(...this.inputs.map((one) => one.field));
    this.optionsBox.hidden = !this.withOptions || !this.inputs.length;
  }

  // Models that may draft for a method: those that fill blanks, or left-to-right ones.
  possibleDrafts(method) {
    const others = this.site.about.models.filter((one) => one.name !== this.modelChoice.value);
    if (method.drafter?.startsWith('diffusion')) {
      return { drafts: others.filter((one) => one.fills).map((one) => one.name), needed: true };
    }
    if (method.drafter !== 'draft=') return { drafts: [], needed: false };
    if (method.method === 'assd') return { drafts: [NO_CHOICE, 'ngram'], needed: false };
    const causal = others.filter((one) => one.methods?.includes('ar') && one.family === 'causal').map((one) => one.name);
    const small = causal.filter((name) => name.includes('draft'));
    return { drafts: [...new Set([...small, ...causal, 'lookup', 'ngram'])], needed: true };
  }

  // What the server is asked for; throws what is wrong with an option.
  request() {
    const options = {};
    for (const input of this.withOptions ? this.inputs : []) {
      const value = input.value();
      if (value !== undefined) options[input.name] = value;
    }
    const draft = this.draftField.hidden ? null : this.draftChoice.value || null;
    return { model: this.modelChoice.value, forerun: { method: this.methodChoice.value, draft, options } };
  }
}

export function choice(names, chosen, onChange) {
  const box = el('select', { onchange: onChange });
  refill(box, names, chosen);
  return box;
}

export function refill(box, names, chosen) {
  box.replaceChildren(...names.map((name) => el('option', { value: name }, name || 'itself')));
  if (chosen != null) box.value = chosen;
}

// An input for one option. Its value is undefined while it is the default.
function optionInput(name, { default: usual, help }) {
  const label = name.replaceAll('_', ' ');
  if (typeof usual === 'boolean') {
    const box = el('input', { type: 'checkbox', checked: usual });
    return { name, field: labelled(label, box, help), value: () => (box.checked === usual ? undefined : box.checked) };
  }
  const isNumber = typeof usual === 'number';
  const box = el('input', { type: isNumber ? 'number' : 'text', step: isNumber ? 'any' : null, value: usual ?? '', size: 10, placeholder: usual == null ? 'default' : null });
  const value = () => {
    const given = box.value.trim();
    if (given === String(usual ?? '')) return undefined;
    if (given === '') return undefined;
    return (isNumber || usual == null) && Number.isFinite(Number(given)) ? Number(given) : given;
  };
  return { name, field: labelled(label, box, help), value };
}

export function numberField(label, value, { min = 0, max = null, step = 1 } = {}) {
  const box = el('input', { type: 'number', value, min, max, step });
  return { box, field: labelled(label, box), get value() { return Number(box.value); } };
}

// The page: controls, the curve, the ops, the picture of tiles and waves, better shapes, experts and commands.
const $ = id => document.getElementById(id);
// Makes an element; strings become text, so that no name is ever read as markup.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== undefined) element.setAttribute(name, value === true ? '' : value);
  }
  element.append(...children);
  return element;
}
const fill = (id, ...children) => $(id).replaceChildren(...children);

const CHOICES = ['axis', 'attention', 'direction', 'routing'], FLAGS = ['gated', 'gate_fused', 'tied'];
const NAMES = [...document.querySelectorAll('#controls input[type=range]')].map(slider => slider.id.slice(2));
const least = name => Number($(`n-${name}`).min), choicesOf = name => [...$(name).options].map(one => one.value);
const COUNTS = ['heads', 'tp', 'mbs', 'ep', 'top_k'], DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [5, 5], [1, 2]];
const CLIFF = 0.02, SLICE_MS = 12, FIRST_MS = 16, MOST_MODELS = 12;  // CLIFF: drop of the rate that is named

let page, state, locks = {}, lines = [], active, models = new Map(), plot, job = 0, shownOp = '', zoom = null, marks = [];

async function start() {
  const packed = Uint8Array.from(atob($('data').textContent.trim()), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream('deflate'));
  const buffer = await new Response(stream).arrayBuffer();
  const [length] = new Uint32Array(buffer, 0, 1), start = 8 + Math.ceil(length / 8) * 8;
  page = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  page.view = (Type, [at, bytes]) => new Type(buffer, start + at, bytes / Type.BYTES_PER_ELEMENT);
  for (const name of ['draws', 'load_draws']) page[name] = Array.from(page.view(Float64Array, page[name]));
  page.shape = functionsOf({code: page.shape});
  state = {...page.setting};
  lines = page.gpus.slice(0, page.lines).map(gpu => gpu.entries[0].id);
  [active] = lines;
  readUrl();
  bindControls();
  load([...lines, active]);
  addEventListener('hashchange', () => { readUrl(); load([...lines, active]); update(); });
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { plot = null; update(); });
  new ResizeObserver(() => plot && plot.setSize({width: $('chart').clientWidth, height: chartHeight()})).observe($('chart'));
  update();
  document.documentElement.dataset.ready = 'yes';
}

// The ops whose sum is drawn: those of a layer, of hidden its products, of the vocabulary the logits.
const along = s => state.axis === 'vocab' ? ops(s).filter(op => op.name === 'logits') : layerOf(s).filter(op => state.axis !== 'hidden' || !op.core);
// The setting at another place of the curve.
const placed = x => state.axis === 'hidden' ? headless(state, x, locks) : changed(state, state.axis, x, locks);
// What the plot draws: the lines that were kept, and the model in detail.
const drawn = () => [...new Set([...lines, active])].slice(-DASHES.length);
const every = () => page.gpus.flatMap(gpu => gpu.entries.map(entry => ({gpu, entry})));
const entryOf = id => every().find(one => one.entry.id === id);
const choose = id => { active = id; load([id]); plot = null; update(); };
const possible = s => !objection(s);
const nameOf = id => { const {gpu, entry} = entryOf(id); return `${gpu.name} · ${entry.dtype} · ${entry.library}`; };

// Unpacks the models that are drawn, and lets go of those that were drawn longest ago.
function load(ids) {
  for (const id of new Set(ids)) {
    const known = models.get(id), {gpu, entry} = entryOf(id), core = gpu.entries.find(one => one.dtype === page.formats[entry.dtype].attention);
    models.delete(id);
    if (core !== entry) load([core.id]);
    models.set(id, known || new Times(gpu, entry, models.get(core.id)));
  }
  for (const id of [...models.keys()].slice(0, -MOST_MODELS)) models.delete(id);
}

function bindControls() {
  for (const name of NAMES) {
    const slider = $(`r-${name}`), lock = $(`lock-${name}`);
    $(`n-${name}`).onchange = event => type(name, event.target.value);
    slider.oninput = () => slide(name, Number(slider.value), Number(slider.step));
    if (lock) lock.onchange = () => { locks[name] = lock.checked; update(); };
  }
  for (const name of CHOICES) $(name).onchange = () => restore({[name]: $(name).value}, name !== 'axis');
  for (const name of ['gated', 'gate_fused']) $(name).onchange = () => restore({[name]: $(name).checked}, true);
  const chosen = names => names.reduce((left, name) => left.filter(one => one.entry[name] === $(name).value), every());
  $('gpu').onchange = () => choose(every().find(({gpu}) => gpu.name === $('gpu').value).entry.id);
  for (const names of [['dtype'], ['dtype', 'library']]) {
    $(names[names.length - 1]).onchange = () => choose(chosen(names).find(({gpu}) => gpu === entryOf(active).gpu).entry.id);
  }
  $('add').onclick = () => { lines = drawn(); plot = null; update(); };
  $('preset').onchange = () => $('preset').value && restore({...page.presets[$('preset').value], preset: $('preset').value});
  $('reset').onclick = () => { locks = {}; $('unknown').textContent = ''; restore({preset: '', ...page.setting}); };
}

// Takes over parts of a setting.
function restore(parts, zoomed = false) {
  state = {...state, ...parts};
  state.gate_fused = state.gate_fused && state.gated;
  if (!zoomed) zoom = null;
  update();
}

// Sizes that have no such heads leave the heads as they are.
function set(name, value) {
  const next = changed(state, name, value, locks), last = state;
  state = NAMES.every(size => Number.isInteger(next[size])) ? next : {...state, [name]: value};
  const followed = SIZES.filter(size => size !== name && state[size] !== last[size]).map(size => `${size} ${last[size]} → ${state[size]}`);
  $('followed').textContent = followed.length ? `With ${name}: ${followed.join(', ')}.`
    : state === next ? '' : `No whole number of heads follows from ${name} ${value}: the other sizes stay.`;
  update();
}

function type(name, text) {
  const value = Number(text), low = least(name);
  if (text.trim() && Number.isInteger(value) && value >= low && value < 2 ** 31) return set(name, value);
  $('wrong').textContent = `${name} = ${text.trim() || 'nothing'}: a whole number of at least ${low} was expected. Nothing was changed.`;
}

// A slider stops at the nearest possible size.
function slide(name, value, step) {
  const low = Number($(`r-${name}`).min);
  const near = Array.from({length: 802}, (_, i) => value + (i % 2 ? 1 : -1) * (i >> 1) * step);
  set(name, near.find(one => one >= low && possible(changed(state, name, one, locks))) ?? value);
}

// Shows the state in every control.
function sync() {
  for (const slider of NAMES.map(name => $(`r-${name}`))) slider.step = state[slider.id.slice(2)] % slider.dataset.step ? 1 : slider.dataset.step;
  for (const name of NAMES) for (const kind of ['n', 'r']) $(`${kind}-${name}`).value = state[name];
  for (const name of page.dimensions) $(`lock-${name}`).checked = !!locks[name];
  for (const kind of ['n', 'r']) $(`${kind}-kv_heads`).disabled = state.kv_rank > 0;
  if (state.experts) state.gated = true;  // as in all published models with experts, and in `predict`
  $('gated').disabled = state.experts > 0;
  for (const name of ['gated', 'gate_fused']) $(name).checked = state[name];
  for (const name of CHOICES) $(name).value = state[name];
  for (const option of $('axis').options) option.disabled = !state.experts && ['moe_ffn', 'top_k', 'ep'].includes(option.value);
  const {gpu, entry} = entryOf(active), libraries = gpu.entries.filter(one => one.dtype === entry.dtype).map(one => one.library);
  const lists = {gpu: page.gpus.map(one => one.name), dtype: gpu.entries.map(one => one.dtype), library: libraries};
  for (const [id, list] of Object.entries(lists)) fill(id, ...[...new Set(list)].map(name => make('option', {value: name}, name)));
  for (const [id, name] of [['gpu', gpu.name], ['dtype', entry.dtype], ['library', entry.library]]) $(id).value = name;
}

function writeUrl() {
  const window = state.sliding_window ? ['sliding_window'] : [], kept = NAMES.filter(name => locks[name]);
  const words = [...NAMES, ...FLAGS, ...CHOICES, ...window].map(name => [name, FLAGS.includes(name) ? +state[name] : state[name]]);
  history.replaceState(null, '', `#${new URLSearchParams([...words, ['keep', kept], ['lines', lines], ['detail', active]])}`);
}

// Takes over the setting of a link, and says what of it the page does not know. The last of equal names counts.
function readUrl() {
  const unknown = [];
  for (const [name, text] of new Map(new URLSearchParams(location.hash.slice(1)))) {
    const value = Number(text), low = NAMES.includes(name) ? least(name) : name === 'sliding_window' ? 0 : Infinity;
    const lists = {keep: one => page.dimensions.includes(one), lines: entryOf, detail: entryOf};
    if (Object.hasOwn(lists, name)) {
      const list = text.split(',').filter(Boolean), known = list.filter(lists[name]);
      if (name === 'keep') locks = Object.fromEntries(known.map(one => [one, true]));
      if (name === 'lines') lines = known.slice(0, DASHES.length - 1);
      if (name === 'detail') active = known[0] || active;
      unknown.push(...list.filter(one => !lists[name](one)).map(one => `${name}=${one}`));
    } else if (text.trim() && Number.isInteger(value) && value >= low && value < 2 ** 31) state[name] = value;
    else if (FLAGS.includes(name) && ['0', '1'].includes(text)) state[name] = text === '1';
    else if (CHOICES.includes(name) && choicesOf(name).includes(text)) state[name] = text;
    else unknown.push(`${name}=${text}`);
  }
  zoom = null;
  $('unknown').textContent = unknown.length ? `Ignored from the link, not known here: ${unknown.join(', ').slice(0, 200)}.` : '';
}

function update() {
  if (!state.experts && ['moe_ffn', 'top_k', 'ep'].includes(state.axis)) state.axis = 'hidden';
  sync();
  const mine = ++job, began = performance.now(), wrong = objection(state);
  $('wrong').textContent = wrong ? `Impossible: ${wrong}. ${draw.curves ? 'The figures below are of the last possible shape.' : 'Change a size, or start again.'}` : '';
  writeUrl();
  if (wrong) return void (document.documentElement.dataset.busy = 'no');
  commands();
  $('no-better').textContent = 'Looking for better shapes …';
  const times = models.get(active), list = ops(state);
  const near = neighbourValue(), other = near && placed(near);
  const before = other && !objection(other) ? {value: near, state: other} : null;
  answer(times, before);
  table(times, list, before);
  picture();
  experts();
  const xs = axisValues(), curves = new Map(drawn().map(id => [id, new Map()]));
  const first = xs.filter((x, i) => i % 4 === 0 || x === state[state.axis]), later = xs.filter(x => !first.includes(x));
  const points = [...first, ...later].flatMap(x => [...curves.keys()].map(id => [id, x]));
  const point = ([id, x]) => {
    const s = placed(x);
    if (possible(s)) curves.get(id).set(x, models.get(id).layer(s, along(s)));
  };
  const left = later.length * curves.size;
  while (points.length > left && performance.now() - began < FIRST_MS) point(points.shift());
  draw(curves);
  page.updateMs = performance.now() - began;
  document.documentElement.dataset.busy = 'yes';
  run(function* () {
    while (points.length) yield point(points.shift());
    cliffs(curves.get(active), times);
    draw(curves);
    neighbours(yield* better(times), times);
    document.documentElement.dataset.busy = 'no';
  }(), mine);
}

// Runs steps in slices, until they are done or another update begins.
function run(steps, mine) {
  const until = performance.now() + SLICE_MS;
  while (performance.now() < until) if (steps.next().done) return;
  setTimeout(() => mine === job && run(steps, mine));
}

// The size to compare with: the multiple of 64 below, or the next possible one if the size is such a multiple.
function neighbourValue() {
  const value = state[state.axis];
  if (!['seq', 'ffn', 'hidden', 'vocab', 'moe_ffn'].includes(state.axis)) return 0;
  if (value % 64 && possible(placed(value - value % 64))) return value - value % 64;
  const step = state.axis === 'seq' ? 1 : 8;
  for (let near = value + step; near < value + 2048; near += step) if (possible(placed(near))) return near;
  return 0;
}

function answer(times, before) {
  const now = times.layer(state), skewed = state.experts && state.routing !== 'balanced', wasted = total(layerOf(state).map(op => times.waste(op)?.us || 0));
  const what = state.direction === 'both' && !state.experts ? 'forward and backward' : 'forward';
  const parts = [make('strong', {}, nameOf(active)), `: one layer ${what} takes `, make('strong', {}, latency(now.us)),
    ` (90 % interval ${latency(now.low)} to ${latency(now.high)}), ${Number.isFinite(now.share) ? percent(now.share) : '?'} of peak. `,
    wasted / now.us < 0.005 ? 'Hardly any of it is lost past edges.' : `${percent(wasted / now.us)} of it is lost past edges${skewed ? ' and to skew' : ''}.`];
  fill('answer', ...parts);
  const said = [], {library} = times.entry.experts, crash = times.crash(state);
  if (crash) said.push(`It crashes in ${crash.whose}, which needs ${crash.statement}: ${crash.claim}.`);
  if (!fits(state, times.gpu, times.format)) said.push('The weights alone exceed the memory of a GPU: spread the experts over more (ep).');
  if (state.experts && library && library !== times.entry.library) said.push(`The times of experts are ${library}'s.`);
  if (skewed) said.push(`Against balanced routing: ${signed(now.us / times.layer({...state, routing: 'balanced'}).us - 1)} time.`);
  if (state.sliding_window && state.sliding_window < state.seq) said.push(`The sliding window of ${state.sliding_window} is not priced: attention is over all tokens.`);
  if (state.kv_rank && state.attention === 'flash') said.push(`Latent attention is not measured: priced as heads of ${ops(state).find(op => op.name === 'attention').head_dim}, with as many FLOPs.`);
  if (!times.rests(state)) said.push(`Nobody measured ${times.entry.dtype} with ${times.entry.library} on ${times.gpu.name}: figures are expected from other GPUs, and their intervals are wide.`);
  if (state.vocab / state.tp > page.largest_side) said.push(`Logits of ${state.vocab / state.tp} columns are left out: no time is predicted above ${page.largest_side}.`);
  if (before) {
    const [here, then] = [state, before.state].map(s => times.layer(s, along(s))), value = state[state.axis];
    const heads = state.axis === 'hidden' ? ['heads', 'kv_heads', 'head_dim'] : [];
    const others = SIZES.filter(name => name !== state.axis && !heads.includes(name) && before.state[name] !== state[name]).map(name => `${name} ${before.state[name]}`);
    said.push(`${state.axis} ${value} against ${before.value}${others.length ? ` (with ${others.join(', ')})` : ''}: ` +
      `${signed(here.us / then.us - 1)} time for ${signed(here.flops / then.flops - 1)} arithmetic${{vocab: ' of the logits', hidden: ' of the products, with any heads'}[state.axis] || ''}.`);
  }
  const width = state.kv_rank ? state.hidden : state.heads * state.head_dim, odd = width === state.hidden ? '' : ` heads × head_dim = ${width}, not hidden = ${state.hidden}.`;
  $('rows').textContent = `Rows of linear layers: seq × mbs = ${state.seq * state.mbs} tokens.${odd}`;
  fill('compared', ...said.flatMap(line => [line, make('br')]));
}

function table(times, list, before) {
  const most = Math.max(...list.map(op => times.estimate(op).us)), old = before ? ops(before.state) : [];
  $('versus').textContent = before ? `against ${state.axis} ${before.value}` : '';
  fill('ops', ...list.map((op, i) => {
    const {us, low, high} = times.estimate(op), share = times.share(op, us), waste = times.waste(op), why = times.reasons(op);
    const part = waste ? waste.us / us : 0, shape = `${sizesOf(op)}${state.experts && op.name.startsWith('mlp_') ? ', in dense layers' : ''}`;
    const show = () => { shownOp = op.label; picture(); };
    const words = waste ? waste.words : why.length ? why[0] : share !== null && share < 0.3 && op.kind === 'gemm' ? 'small: launch and memory, no edge' : '';
    const bar = [1 - part, part].map((of, j) => make('span', {class: ['used', 'wasted'][j], style: `width: ${100 * us / most * of}%`}));
    const number = (...content) => make('td', {class: 'num'}, ...content);
    return make('tr', {onmouseenter: show, 'data-op': op.label},
      make('th', {scope: 'row'}, drawable(op) ? make('button', {type: 'button', class: 'op', onclick: show, onfocus: show, title: 'Show its tiles'}, op.label) : op.label),
      make('td', {}, shape), make('td', {class: 'wide'}, make('div', {class: 'bar', 'aria-hidden': true}, ...bar)),
      number(latency(us), make('div', {class: 'interval'}, `${latency(low)} – ${latency(high)}`)),
      number(share === null ? '?' : percent(share)), number(waste ? latency(waste.us) : '–'),
      number(before && old[i] && !(op.core && state.axis === 'hidden') ? signed(us / times.estimate(old[i]).us - 1) : ''), make('td', {}, words));
  }));
}

const sizesOf = op => op.kind === 'gemm' ? `${op.batch > 1 ? `${op.batch} × ` : ''}${op.m}×${op.n}×${op.k}` : op.kind === 'softmax' ? `${op.batch}×${op.rows}×${op.rows}`
  : op.kind === 'moe' ? `${op.tokens} tokens to ${op.top_k} of ${op.num_experts}` : `${op.batch}×${op.heads} heads of ${op.head_dim}, ${op.seq_q} tokens`;
const drawable = op => op.kind === 'gemm' && op.batch === 1;

function axisValues() {
  const now = state[state.axis], name = state.axis, near = neighbourValue();
  if (name !== 'heads' && COUNTS.includes(name)) return sorted([1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 64, now]);
  const [low, high] = zoom || [Math.max(1, 0.55 * now), 1.5 * now], grain = name === 'heads' ? 1 : 8;
  const step = grain * 2 ** Math.max(0, Math.ceil(Math.log2((high - low) / 90 / grain))), found = multiples(step, low, high);
  // One past an edge: where a new tile, and perhaps a wave, begins.
  const past = name === 'seq' && step <= 64 ? found.filter(x => x % 64 === 0).map(x => x + 1) : [];
  return sorted([now, ...found, ...past, ...(near ? [near] : [])]);
}

const sorted = numbers => [...new Set(numbers)].sort((a, b) => a - b);
const chartHeight = () => Math.max(240, Math.min(420, innerHeight * 0.42));
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function draw(curves) {
  const ids = [...curves.keys()], xs = sorted([...curves.values()].flatMap(curve => [...curve.keys()]));
  const of = (id, pick) => xs.map(x => { const one = curves.get(id).get(x); return one && Number.isFinite(one.share) ? 100 * pick(one) : null; });
  const data = [xs];
  for (const id of ids) data.push(of(id, one => one.share), of(id, one => one.share * one.us / one.high), of(id, one => one.share * one.us / one.low));
  draw.curves = curves;
  if (plot && plot.lines === `${state.axis} ${ids}`) return plot.setData(data);
  if (plot) plot.destroy();
  $('chart').replaceChildren();
  const series = [{label: state.axis}], bands = [];
  ids.forEach((id, i) => {
    const colour = css(`--curve-${i}`);
    const value = (u, v, s, at) => at === null || at === undefined ? '–' : v === null ? '–' : `${v.toFixed(1)} % · ${latency(draw.curves.get(id).get(u.data[0][at]).us)}`;
    series.push({label: nameOf(id), stroke: colour, width: 2, dash: DASHES[i], value, spanGaps: true, points: {size: 4}},
      {label: 'low', stroke: 'transparent', points: {show: false}, spanGaps: true}, {label: 'high', stroke: 'transparent', points: {show: false}, spanGaps: true});
    bands.push({series: [3 * i + 3, 3 * i + 2], fill: `${colour}28`});
  });
  const axis = {stroke: css('--ink'), grid: {stroke: css('--line')}, ticks: {stroke: css('--line')}, font: '13px system-ui, sans-serif'};
  plot = new uPlot({
    width: $('chart').clientWidth, height: chartHeight(), series, bands,
    scales: {x: {time: false}, y: {range: (u, low, high) => [Math.max(0, Math.floor(low - 3)), Math.min(100, Math.ceil(high + 3))]}},
    axes: [{...axis, label: $('axis').selectedOptions[0].textContent, labelFont: axis.font, values: (u, values) => values.map(String)},
      {...axis, label: 'share of peak, %', labelFont: axis.font, size: 60}],
    legend: {live: true}, cursor: {drag: {x: true, y: false}},
    hooks: {draw: [marker], setSelect: [u => {
      const low = u.posToVal(u.select.left, 'x'), high = u.posToVal(u.select.left + u.select.width, 'x');
      if (u.select.width > 8) { zoom = [low, high]; u.setSelect({left: 0, width: 0}, false); update(); }
    }]},
  }, data, $('chart'));
  plot.lines = `${state.axis} ${ids}`;
  plot.root.querySelectorAll('.u-series').forEach((row, i) => {
    row.hidden = i > 0 && (i - 1) % 3 > 0;
    if (!i || row.hidden) return;
    const head = row.querySelector('th'), band = () => [1, 2].forEach(j => plot.setSeries(i + j, {show: plot.series[i].show}));
    Object.assign(head, {tabIndex: 0, role: 'button', ariaLabel: `Show or hide ${nameOf(ids[(i - 1) / 3])}`});
    head.addEventListener('click', () => setTimeout(band));
    head.onkeydown = event => { if ([' ', 'Enter'].includes(event.key)) { event.preventDefault(); head.click(); } };
  });
  const remove = id => { lines = lines.filter(line => line !== id); plot = null; update(); };
  const border = i => `border-top: 3px ${['solid', 'dashed', 'dotted'][i % 3]} var(--curve-${i})`;
  fill('shown', ...ids.map((id, i) => make('li', {}, make('span', {class: 'swatch', style: border(i)}), nameOf(id),
    lines.includes(id) ? make('button', {type: 'button', 'aria-label': `Remove ${nameOf(id)}`, onclick: () => remove(id)}, '×') : '')));
}

// Marks the present value and the cliffs.
function marker(u) {
  const c = u.ctx, ratio = devicePixelRatio, {left, top, width, height} = u.bbox, place = x => u.valToPos(x, 'x', true);
  const inside = x => place(x) >= left && place(x) <= left + width, now = state[state.axis], at = place(now);
  const style = (colour, weight, textAlign) => Object.assign(c, {fillStyle: css(colour), font: `${weight}px system-ui, sans-serif`, textAlign});
  c.save();
  if (inside(now)) {
    style('--ink', 12 * ratio, at > left + width / 2 ? 'right' : 'left');
    c.fillRect(at - 0.75 * ratio, top, 1.5 * ratio, height);
    c.fillText(` ${now} `, at, top + 12 * ratio);
  }
  marks.forEach(({x, y}, i) => {
    if (!inside(x)) return;
    const py = u.valToPos(y, 'y', true) + 14 * ratio;
    style('--cliff', `bold ${11 * ratio}`, 'center');
    c.beginPath(); c.arc(place(x), py, 8 * ratio, 0, 7); c.fill();
    c.fillStyle = css('--paper');
    c.fillText(`${i + 1}`, place(x), py + 4 * ratio);
  });
  c.restore();
}

// Names the largest drops of the share of peak between neighbouring sizes, with the op that loses most there.
function cliffs(curve, times) {
  const xs = sorted(curve.keys()), share = x => curve.get(x).share;
  marks = xs.slice(1).map((x, i) => ({x, from: xs[i], drop: 1 - share(x) / share(xs[i]), y: 100 * share(x)}))
    .filter(one => one.drop >= CLIFF).sort((a, b) => b.drop - a.drop).slice(0, 5).sort((a, b) => a.x - b.x);
  fill('cliffs', ...marks.map(one => {
    const [old, now] = [one.from, one.x].map(x => along(placed(x)));
    const slower = curve.get(one.x).us - curve.get(one.from).us * curve.get(one.x).flops / curve.get(one.from).flops;
    const worst = now.map((op, i) => ({op, before: old[i], more: times.estimate(op).us - times.estimate(old[i]).us * (flopsOf(op) || op.batch) / (flopsOf(old[i]) || old[i].batch)}))
      .sort((a, b) => b.more - a.more)[0];
    const cause = worst.more > slower / 4 ? causeOf(worst, times) : 'ops of a lower rate take a larger part; none of them is much slower for its arithmetic';
    return make('li', {}, make('strong', {}, `${state.axis} ${one.from} → ${one.x}: −${percent(one.drop)} of the rate. `), cause);
  }));
  $('no-cliff').textContent = marks.length ? '' : `No drop of ${percent(CLIFF)} or more between the sizes drawn.`;
}

function causeOf({op, before}, times) {
  const tile = one => tileName(times.tile(times.estimate(one).kernel));
  const waste = times.waste(op), reasons = times.reasons(op), words = waste ? waste.words : reasons.length ? reasons[0] : '';
  const kernel = op.kind === 'gemm' && tile(before) !== tile(op) ? `the library probably changes its kernel, ${tile(before)} → ${tile(op)}` : '';
  const guessed = op.kind === 'gemm' && times.alignment(op) < 16 && !times.of(op).entry.gemm.unaligned ? 'nobody measured products of unaligned rows there' : '';
  return `${op.label}: ${[words, kernel, guessed].filter(Boolean).join('; ') || 'loses most; no tile or wave explains it here'}`;
}

function picture() {
  const gemms = ops(state).filter(drawable);
  const op = gemms.find(one => one.label === shownOp) || gemms[0], times = models.get(active);
  const {us, kernel} = times.estimate(op), q = times.credible(op, kernel, times.share(op, us)), canvas = $('tiles');
  $('tiles-title').textContent = `${op.label}: ${op.m}×${op.n}×${op.k}`;
  canvas.hidden = !q;
  if (!q) {
    const t = times.tile(kernel);
    $('tiles-text').textContent = times.entry.gemm.in_waves
      ? `No picture: ${t.held > 1 ? `${t.held} blocks of the expected ${t.blockM}x${t.blockN} tile share an SM, so that a partly filled wave is shorter` : 'its tiles and waves contradict the expected rate'}.`
      : `No picture: on ${times.gpu.name} the waves of one tile do not explain the steps that were measured${times.entry.gemm.rows ? '' : ' on related GPUs'}, so it would mislead.`;
    return;
  }
  const sms = times.gpu.sm_count, idle = sms - q.last, ratio = devicePixelRatio, width = canvas.clientWidth || 640;
  $('tiles-text').textContent = `Each of ${q.blocks} blocks computes a tile of ${q.blockM}×${q.blockN}${q.splitK > 1 ? ` and one of ${q.splitK} parts of k` : ''}: ${q.tilesM} × ${q.tilesN} tiles cover ${op.m}×${op.n}. ` +
    `${sms} SMs take one block each at a time, so ${q.waves} wave${q.waves > 1 ? 's' : ''}; in the last one ${q.last} SM${q.last > 1 ? 's work' : ' works'} and ${idle} ${idle === 1 ? 'is' : 'are'} idle (red). ` +
    `Tiles ${percent(q.tileShare)}, waves ${percent(q.waveShare)} used.`;
  const shown = Math.min(q.waves, 12), cell = Math.max(2, Math.min(12, width / sms)), left = Math.floor(width * 0.34);
  const across = Math.max(1, Math.floor((width - left - 20) / cell)), perWave = Math.ceil(sms / across);
  const rows = shown * (perWave + 0.6), tileH = Math.min(left / q.tilesN, 260 / q.tilesM), height = Math.max(rows * cell + 30, Math.min(260, tileH * q.tilesM) + 30);
  canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = `${height}px`;
  const c = canvas.getContext('2d'), box = (colour, ...place) => { c.fillStyle = css(colour); c.fillRect(...place); };
  c.scale(ratio, ratio);
  c.font = '12px system-ui, sans-serif';
  c.fillStyle = css('--ink');
  c.fillText(`output, ${op.m} × ${op.n}`, 0, 12);
  c.fillText(q.waves > shown ? `SMs, the last ${shown} of ${q.waves} waves` : 'SMs, wave by wave', left + 20, 12);
  const hue = wave => wave === q.waves - 1 ? '--last' : wave % 2 ? '--wave-b' : '--wave-a';
  const [w, h] = [(left - 4) / q.tilesN, Math.min(260, height - 30) / q.tilesM], gap = w > 4 && h > 4 ? 1 : 0;
  // Tiles of one row and wave are drawn together: thousands of tiles stay fast.
  for (let i = 0; i < q.tilesM; i++) for (let j = 0, next; j < q.tilesN; j = next) {
    const tile = i * q.tilesN + j, wave = Math.floor(tile * q.splitK / sms);
    next = gap ? j + 1 : Math.min(q.tilesN, j + Math.max(1, Math.ceil((wave + 1) * sms / q.splitK - tile)));
    box(hue(wave), j * w, 20 + i * h, (next - j) * w - gap, h - gap);
  }
  Object.assign(c, {strokeStyle: css('--cliff'), lineWidth: 1.5});
  c.strokeRect(0.5, 20.5, w * op.n / q.blockN - 1, h * op.m / q.blockM - 1);
  for (let row = 0; row < shown; row++) for (let sm = 0; sm < sms; sm++) {
    const wave = q.waves - shown + row, busy = wave === q.waves - 1 ? q.last : sms;
    const y = 20 + (row * (perWave + 0.6) + Math.floor(sm / across)) * cell;
    box(sm < busy ? hue(wave) : '--idle', left + 20 + (sm % across) * cell, y, cell - 1, cell - 1);
  }
  canvas.setAttribute('aria-label', $('tiles-text').textContent);
}

// Compares the shapes near per token and parameter, with backward passes where there are models (advice.search).
function* better(times) {
  const costOf = s => {
    const parts = new Map();
    for (const op of ops({...s, direction: 'both'})) {
      const one = times.estimate(op), key = keyOf(op), us = (parts.get(key)?.us || 0) + one.us * op.count;
      parts.set(key, {kind: op.kind, us, half: Math.log(one.high / one.low) / 2});
    }
    const every = [...parts.values()], us = total(every.map(part => part.us)), perToken = us * s.tp / (s.seq * s.mbs);
    const attention = total(every.filter(part => part.kind === 'attention').map(part => part.us / us));
    return {s, parts, us, perToken, each: perToken / parameters({...s, vocab: Math.min(s.vocab, state.vocab)}), attention};
  };
  const base = costOf(state), groups = new Map(), best = new Map(), all = [];
  for (const one of near(state, locks)) yield fits(one.s, times.gpu, times.format) && all.push(one);
  const running = all.filter(({s}) => !times.crash(s));
  for (const {group, joint, s} of running.length ? running : all) {
    const one = costOf(s), factor = ratioFactor(base, one, times), ratio = base.each / one.each;
    // A sliding window is not priced: the interval holds the gain without attention, too.
    const windowed = 0 < state.sliding_window && state.sliding_window < state.seq;
    const other = windowed ? ratio * (1 - base.attention) / (1 - one.attention) : ratio;
    const gains = {gain: ratio - 1, low: Math.min(ratio, other) / factor - 1, high: Math.max(ratio, other) * factor - 1};
    gains.sure = gains.low > 0 && s.ep <= state.ep && s.tp <= state.tp;
    const alike = joint ? ['heads', 'head_dim'].filter(name => s[name] === state[name]) : [];
    for (const name of [group, ...alike.map(size => `hidden with ${size}`)]) groups.set(name, [...(groups.get(name) || []), {...one, joint, ...gains}]);
    yield;
  }
  for (const [group, all] of groups) {
    const one = preferred(group, all);
    const key = NAMES.map(name => one.s[name]).join(), alike = group.includes('with') || best.get(key)?.alike;
    if (one.gain >= page.space.worth_moving) best.set(key, {...one, alike});
  }
  return [...best.values()].sort((a, b) => b.sure - a.sure || b.gain - a.gain).filter((one, i) => i < 5 || one.alike);
}

// advice.cost.ratio_factor
function ratioFactor(above, below, times) {
  const shared = {}, parts = [], common = times.rests(state) ? 0 : page.unmeasured_common;
  for (const key of new Set([...above.parts.keys(), ...below.parts.keys()])) {
    const a = above.parts.get(key), b = below.parts.get(key), {kind, half} = a || b;
    parts.push(((a ? a.us / above.us : 0) - (b ? b.us / below.us : 0)) * half);
    shared[kind] = (shared[kind] || 0) + parts[parts.length - 1];
  }
  const squares = list => total(list.map(part => part ** 2));
  return Math.exp(page.wider * Math.sqrt((1 - common) * squares(parts) + common * squares(Object.values(shared))));
}

function neighbours(found, times) {
  const hours = one => one.perToken * 1e12 / 3.6e9;
  const changes = s => [...SIZES, ...EXPERT_SIZES].filter(name => s[name] !== state[name] && !(name === 'kv_heads' && kvHeads(s) === s.heads && kvHeads(state) === state.heads))
    .map(name => `${name} ${state[name]} → ${s[name]}`).join(', ');
  const [best] = found, take = one => make('button', {type: 'button', 'aria-label': `Take ${changes(one.s)}`, onclick: () => restore(one.s)}, 'Take');
  const gain = one => `${signed(one.gain)} (${signed(one.low)} to ${signed(one.high)})`;
  if (best && best.sure) fill('best', 'Better near it: ', make('strong', {}, changes(best.s)), `: ${gain(best)} tokens per second at equal parameters. `, take(best));
  else fill('best', `No shape near it is surely faster${best ? `; the best guess is ${changes(best.s)}, ${gain(best)}` : ''}.`);
  fill('better', ...found.map(one => make('tr', {}, make('td', {}, changes(one.s)),
    make('td', {class: 'num'}, signed(one.gain)), make('td', {class: 'num'}, `${signed(one.low)} to ${signed(one.high)}`),
    make('td', {class: 'num'}, signed(parameters(one.s) / parameters(state) - 1)), make('td', {class: 'num'}, hours(one).toFixed(0)),
    make('td', {}, take(one)))));
  $('no-better').textContent = found.length ? (found.some(one => one.sure) ? '' : 'None is surely faster: measure before you move.') : `No shape near this one gains ${percent(page.space.worth_moving)} or more.`;
}

function experts() {
  const op = ops(state).find(one => one.kind === 'moe');
  $('experts').hidden = !op;
  if (!op) return void ($('experts-text').textContent = 'A dense model. Set experts above 0: they replace the MLP.');
  const rows = tokensPerExpert(op, page.draws), padded = rows.map(n => cdiv(n, 128) * 128);
  const ranks = rankRows(op), most = Math.max(...padded, 1);
  $('experts-text').textContent = `${op.tokens} tokens × ${op.top_k} = ${total(rows)} rows for ${op.num_experts} experts: ${Math.min(...rows)} to ${Math.max(...rows)} each. ` +
    `Tiles of 128 rows pad them to ${total(padded)}: ${percent(1 - total(rows) / total(padded))} of the rows computed are padding. ` +
    `The busiest of ${op.ep} GPU${op.ep > 1 ? 's' : ''} has ${Math.max(...ranks)} rows, ${(Math.max(...ranks) * op.ep / total(rows)).toFixed(2)} times the average. ` +
    `Each row is multiplied by ${(op.gated ? 2 : 1) * op.expert_ffn / op.tp}×${op.hidden} and ${op.hidden}×${op.expert_ffn / op.tp} weights. Dispatch and combine are left out.`;
  const part = (name, n) => make('span', {class: name, style: `height: ${100 * n / most}%`});
  fill('experts', ...rows.map((n, e) => make('div', {class: 'expert', title: `expert ${e}: ${n} rows, ${padded[e]} with padding`},
    part('pad', padded[e] - n), part('rows', n))));
  $('experts').setAttribute('aria-label', $('experts-text').textContent);
}

function commands() {
  const {gpu, entry} = entryOf(active), s = {...state, kv_heads: kvHeads(state)};
  const usual = gpu.entries.find(one => one.dtype === entry.dtype), library = usual === entry ? '' : ` --library ${entry.library}`;
  const sizes = names => names.map(name => `--${name.replace('_', '-')} ${s[name]}`).join(' ');
  const gate = `${s.gated ? ' --gated' : ''} --attention ${s.attention}`, moe = s.experts ? ['experts', 'top_k', 'moe_ffn', 'ep'] : [];
  const all = ['hidden', 'heads', 'kv_heads', 'head_dim', 'ffn', 'seq', 'mbs', 'tp', 'vocab', ...moe], dim = s.axis.replace('_', '-');
  const grouped = [s.gated ? 'experts_up_gate' : 'experts_up', 'experts_down'];
  const others = all.filter(name => name !== s.axis), priced = [...layerOf(s), ...ops(s).filter(op => op.name === 'logits')];
  // `predict` prices a layer's routed products together, `sweep` measures them one by one.
  const named = routed => [...new Set(priced.flatMap(op => op.kind === 'moe' ? routed : op.name))];
  const xs = axisValues().filter(x => x % 8 === 0 || COUNTS.includes(s.axis));
  const range = COUNTS.includes(s.axis) ? xs.join() : `${xs[0]}:${xs[xs.length - 1]}:${xs[1] - xs[0] || 8}`;
  // Heads follow hidden here, so a sweep over hidden leaves their ops out, and key/value heads with them.
  const moving = {hidden: [...(s.heads * s.head_dim === s.hidden ? ['heads', 'kv_heads', 'head_dim'] : []), ...(s.ffn === 4 * s.hidden && !locks.ffn ? ['ffn'] : [])], heads: ['kv_heads', 'head_dim']}[s.axis] || [];
  const follows = others.filter(name => !moving.includes(name)), some = s.kv_heads !== s.heads && moving.includes('heads');
  const swept = named(grouped).filter(name => !moving.includes('heads') || !(['attention', 'scores', 'softmax', 'context'].includes(name) || (some && name === 'qkv')));
  const tail = list => ` --dtype ${entry.dtype}${library} --ops ${list.join()}${s.direction === 'both' && !s.experts ? ' --direction both' : ''}`;
  const kept = page.dimensions.filter(name => locks[name]), keep = kept.length ? ` --keep ${kept.join()}` : '';
  const routing = s.experts ? ` --routing ${s.routing}` : '', layer = presetOption(s, []), model = presetOption(s, ['tied', 'dense_layers']);
  const lines = {
    predict: `quantbench predict --gpu ${gpu.slug}${layer} --dim ${dim}=${s[s.axis]} ${sizes(others)}${gate}${routing}${tail(named('experts'))}`,
    advise: `quantbench advise --gpu ${gpu.slug}${model} ${sizes([...all, 'layers'])}${gate}${routing} --dtype ${entry.dtype}${library}${keep}`,
    sweep: `quantbench sweep${layer} --dim ${dim}=${range} ${sizes(follows)}${gate}${routing}${tail(swept)}`,
  };
  for (const [name, line] of Object.entries(lines)) {
    $(`c-${name}`).textContent = line;
    const copied = () => { $('copied').textContent = `${name} line copied`; };
    const selected = () => { getSelection().selectAllChildren($(`c-${name}`)); $('copied').textContent = `${name} line selected: copy it with Ctrl+C`; };
    $(`copy-${name}`).onclick = async () => navigator.clipboard.writeText(line).then(copied, selected);
  }
}

// Returns the option that names the nearest preset that says what no option does (of `more` too), or asks for a config.
function presetOption(s, more) {
  const said = {gate_fused: s.gate_fused, kv_rank: s.kv_rank, shared_ffn: s.experts && s.shared_ffn,
    tied: more.includes('tied') && !s.tied, dense_layers: more.includes('dense_layers') && s.experts && s.dense_layers};
  if (!Object.values(said).some(Boolean)) return '';
  const must = ['gated', 'gate_fused', 'kv_rank', ...(s.kv_rank ? LATENT_SIZES : []), ...(s.experts ? ['shared_ffn'] : []), ...more];
  const same = Object.entries(page.presets).filter(([, one]) => must.every(name => one[name] === s[name]) && !one.experts === !s.experts);
  const equal = ([name, one]) => (name === s.preset) * NAMES.length + NAMES.filter(size => one[size] === s[size]).length;
  const [nearest] = same.sort((a, b) => equal(b) - equal(a));
  return nearest ? ` --model ${nearest[0]}` : ' --config CONFIG.json';
}

start().catch(error => { $('wrong').textContent = `The page cannot run here: ${error.message}. It needs a browser of 2023 or later.`; throw error; });

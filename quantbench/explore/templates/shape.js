// Tiles and waves, edges, sums and shapes near a setting: the arithmetic of quantbench.quantization, advice and sweep.axes,
// tested against them on random settings. Ops, parameters and what makes a shape impossible are generated (page.shape).
const cdiv = (a, b) => Math.ceil(a / b);
// Rounds as Python's format does: exact halves to even.
const fixed = (x, d) => (x * 10 ** d % 1 === 0.5 && Number.isInteger(x * 2 ** 20) ? roundEven(x * 10 ** d) / 10 ** d : x).toFixed(d);
const percent = share => `${fixed(100 * share, Math.abs(100 * share) >= 9.95 ? 0 : 1)} %`;
const signed = share => `${share < 0 ? '−' : '+'}${percent(Math.abs(share))}`;
const digits = value => fixed(value, value > 0 ? Math.max(0, 2 - Math.floor(Math.log10(value))) : 0);
const latency = us => us < 999.5 ? `${digits(us)} µs` : us < 999.5e3 ? `${digits(us / 1e3)} ms` : `${digits(us / 1e6)} s`;

const SIZES = ['hidden', 'heads', 'kv_heads', 'head_dim', 'ffn', 'seq', 'mbs', 'tp', 'vocab', 'layers'];
const EXPERT_SIZES = ['experts', 'top_k', 'moe_ffn', 'ep', 'shared_ffn', 'dense_layers'];
const LATENT_SIZES = ['kv_rank', 'q_rank', 'rope_dim', 'value_dim'];

// The sizes that a setting has: those of experts and of latent attention only if it has them.
const exact = s => ({...s, kv_heads: kvHeads(s),
  ...(s.experts ? {} : {top_k: 0, moe_ffn: 0, ep: 1, shared_ffn: 0, dense_layers: 0}),
  ...(s.kv_rank ? {} : {q_rank: 0, rope_dim: 0, value_dim: 0})});
// Key/value heads; with latent attention each head has its own.
const kvHeads = s => s.kv_rank ? s.heads : s.kv_heads;
const parameters = s => page.shape.parameters(exact(s));

// Returns what makes a shape impossible, or ''.
function objection(s) {
  const part = NAMES.find(name => !Number.isInteger(s[name]));
  if (part) return `${part} = ${s[part]}; expected a whole number`;
  if (s.experts > page.most_experts) return `experts = ${s.experts}; expected at most ${page.most_experts}, which are drawn`;
  const found = page.shape.objection(exact(s)), side = op => op.kind === 'gemm' ? Math.max(op.m, op.n, op.k) : 0;
  const wide = found ? null : ops(s).find(op => side(op) > page.largest_side);
  return wide ? `${wide.name} has a side of ${side(wide)}: no time is predicted above ${page.largest_side}` : found;
}

// Returns the ops of one GPU (TransformerShape.modelled_ops). Logits too wide for the models are left out.
function ops(s) {
  const wide = s.vocab / s.tp > page.largest_side;
  return page.shape[`${s.attention}Ops`](exact(s))
    .filter(op => (s.direction === 'both' || op.phase === 'forward') && !(wide && op.name === 'logits'))
    .map(op => op.kind === 'moe' ? {...op, distribution: s.routing} : op);
}

// The layer alone, each op once: of a model with experts, a layer that has them.
const layerOf = s => ops(s).filter(op => op.name !== 'logits' && !(s.experts && op.name.startsWith('mlp_')));

function flopsOf(op) {
  if (op.kind === 'gemm') return 2 * op.batch * op.m * op.n * op.k;
  const products = op.phase === 'backward' ? 5 : 2;
  if (op.kind === 'attention') return products * op.batch * op.heads * op.seq_q * (op.seq_q + 1) * op.head_dim;
  return op.kind === 'moe' ? 2 * Math.max(...rankRows(op)) * op.hidden * (op.gated ? 3 : 2) * op.expert_ffn / op.tp : 0;
}

const rankRows = (op, rows = tokensPerExpert(op, page.draws), local = op.num_experts / op.ep) =>
  Array.from({length: op.ep}, (_, rank) => total(rows.slice(rank * local, (rank + 1) * local)));

// The sides of the routed products of a layer, and the rows of each expert of the busiest GPU (MoE.grouped_gemms).
function groupedGemms({phase, ...op}) {
  const rows = tokensPerExpert(op, page.draws), ranks = rankRows(op, rows), local = op.num_experts / op.ep, ffn = op.expert_ffn / op.tp;
  const first = ranks.indexOf(Math.max(...ranks)) * local, held = rows.slice(first, first + local).map(n => ({phase, 'rows of an expert': n}));
  return [{phase, n: op.gated ? 2 * ffn : ffn, k: op.hidden}, {phase, n: op.hidden, k: ffn}, ...held];
}

// Whether the weights of a model with experts leave memory on each of its GPUs.
const fits = (s, gpu, format) => !s.experts || page.shape.weights(exact(s)) * format.weight < gpu.memory_bytes;

const named = ([us, low, high, kernel]) => ({us, low, high, kernel});
// What of an op its time depends on.
const keyOf = ({name, label, count, sides, phase, ...work}) => JSON.stringify(work.kind === 'gemm' ? work : [work, phase]);

// The models of one GPU, number format and library; `core`: those of its attention's number format.
class Times {
  constructor(gpu, entry, core) {
    const {gemm} = entry, attention = gpu.attention[entry.dtype];
    Object.assign(this, {gpu, entry, core: core || this, format: page.formats[entry.dtype], peak: gpu.peaks[entry.dtype],
      known: new Map(), gemm: functionsOf(gemm), experts: functionsOf(entry.experts), softmaxes: functionsOf(gpu.softmax),
      attention: attention && functionsOf(attention), kernels: page.view(Float64Array, gemm.kernels)});
    // Times that were measured, by m, n and k; three for each layout.
    const sizes = page.view(Int32Array, gemm.measured.sizes), times = page.view(Float32Array, gemm.measured.times);
    const rows = Array.from({length: sizes.length / 3}, (_, row) => row);
    this.measured = new Map(rows.map(row => [sizes.subarray(3 * row, 3 * row + 3).join(), times.subarray(9 * row, 9 * row + 9)]));
  }
  // The models of an op.
  of(op) { return op.core ? this.core : this; }
  // Whether all models of a setting's ops rest on measurements.
  rests(s) { return this.entry.gemm.rows * this.core.entry.gemm.rows > 0 && !(s.experts && !this.entry.experts.rows); }
  // Returns {us, low, high} of an op; of a product also its kernel, of a softmax the time of one fused kernel.
  estimate(op) {
    if (op.core && this.core !== this) return this.core.estimate(op);
    const key = keyOf(op), known = this.known;
    if (known.size > 60000) known.clear();
    if (!known.has(key)) known.set(key, this[{gemm: 'batched', attention: 'heads'}[op.kind] || op.kind](op));
    return known.get(key);
  }
  heads(op) { return named(this.attention[op.phase](op.batch, op.heads, op.kv_heads, op.seq_q, op.head_dim)); }
  // The routed experts of a layer, on the GPU with the most rows; of many tokens, with fewer GPUs (moe_features.fewer_gpus).
  moe(op) {
    const {tokens, hidden, expert_ffn, num_experts, top_k, gated, tp, ep} = op, {tiles, most_tokens} = this.entry.experts;
    const fewer = multiples(1, 1, ep).find(f => f === ep || (ep % f === 0 && tokens <= f * most_tokens)), ffn = expert_ffn / tp;
    return named(this.experts.times(tokens / fewer, hidden, expert_ffn, ffn, gated ? 2 * ffn : ffn,
      num_experts / fewer, top_k, ep / fewer, ...expertLoads(op, tiles, page.load_draws)));
  }
  // Megatron's softmax of unfused attention; separate kernels move more bytes than the fused one.
  softmax(op) {
    const {bytes, separate, objections} = this.bytes(op), by = objections.length ? separate / bytes : 1;
    const [us, low, high] = this.softmaxes.times(bytes, op.batch * op.rows, op.rows);
    return {us: by * us, low: by * low, high: by * high, fused: us};
  }
  // Returns {us, low, high, kernel} of a product as it was measured or is predicted.
  product(m, n, k, batch, layout) {
    const run = k < this.entry.gemm.least_k ? this.gemm.short : this.gemm.times, found = named(run(m, n, k, batch, layout));
    const measured = batch === 1 && this.measured.get(`${m},${n},${k}`)?.subarray(3 * layout, 3 * layout + 3);
    return measured ? {...named(measured), kernel: found.kernel} : found;
  }
  batched(op) {
    const batch = Math.min(op.batch, Math.floor(page.largest_side / op.m)), by = op.batch / batch;
    const found = this.product(op.m, op.n, op.k, batch, op.layout), {fp32} = this.gpu.peaks;
    if (op.batch === 1) return found;
    const [us, low, high] = [by * found.us, by * found.low, by * found.high];
    const aligned = [op.m, op.n, op.k].every(side => side % 8 === 0);
    if (!['fp16', 'bf16'].includes(this.entry.dtype) || !fp32 || aligned) return {...found, us, low, high};
    // Unaligned batches: latency.op_times.as_run.
    const {share, spread} = page.unaligned, slow = Math.max(us, flopsOf(op) / (fp32 * 1e6 * share));
    return {...found, us: slow, low: Math.max(slow / spread, low), high: slow * spread};
  }
  // Returns {blockM, blockN, splitK, held} of a kernel.
  tile(kernel) {
    const [blockM, blockN, splitK, held] = this.kernels.subarray(4 * kernel, 4 * kernel + 4);
    return {blockM, blockN, splitK, held};
  }
  // Bytes of a softmax in one kernel and in separate ones, and why Megatron's fused kernel does not run.
  bytes(op) { return page.shape[`${op.phase}_${this.of(op).entry.dtype}`](op); }
  share(op, us) {
    const {peak, gpu} = this.of(op);
    if (op.kind === 'softmax') return this.bytes(op).bytes / us / gpu.bytes_per_us;
    return peak ? flopsOf(op) / us / 1e6 / peak : null;
  }
  // Returns {us, low, high, share, flops} of a setting's layer without logits, as `quantbench predict` sums it,
  // or of a list of its ops.
  layer(s, list = layerOf(s)) {
    const times = list.map(op => this.estimate(op)), us = total(times.map(one => one.us));
    const shares = list.map((op, i) => op.kind === 'softmax' ? 0 : (this.share(op, times[i].us) ?? NaN) * times[i].us);
    const correlation = this.rests(s) ? 0.5 : 1;
    const joined = half => Math.sqrt((1 - correlation) * total(half.map(x => x * x)) + correlation * total(half) ** 2);
    return {us, low: us - joined(times.map(one => one.us - one.low)), high: us + joined(times.map(one => one.high - one.us)),
      share: total(shares) / us, flops: total(list.map(flopsOf))};
  }
  // Tiles and waves of a GEMM with the kernel that the model chooses.
  quantize(op, kernel) {
    const t = this.of(op).tile(kernel), sms = this.gpu.sm_count;
    const tilesM = cdiv(op.m, t.blockM), tilesN = cdiv(op.n, t.blockN), blocks = op.batch * tilesM * tilesN * t.splitK;
    const waves = cdiv(blocks, sms), waveShare = blocks / (waves * sms);
    const tileShare = op.m * op.n / (tilesM * t.blockM * tilesN * t.blockN);
    return {...t, tilesM, tilesN, blocks, waves, last: blocks - (waves - 1) * sms, tileShare, waveShare,
      efficiency: tileShare * waveShare};
  }
  // The same, or null where waves cannot be stated (quantization.credible_waves).
  credible(op, kernel, share) {
    const found = this.quantize(op, kernel);
    return this.of(op).entry.gemm.in_waves && found.held === 1 && !(share > found.efficiency) ? found : null;
  }
  // Reasons why an op runs below peak, as analysis.blocks.idle_reasons words them.
  reasons(op) {
    if (op.kind === 'attention' && op.head_dim % 8) return [`head_dim = ${op.head_dim} is not a multiple of 8`];
    if (op.kind !== 'gemm') return [];
    const {us, kernel} = this.estimate(op), share = this.share(op, us), q = this.quantize(op, kernel);
    const sides = [['m', op.m, q.tilesM * q.blockM], ['n', op.n, q.tilesN * q.blockN]];
    const idle = sides.map(([name, size, to]) => [1 - size / to, `${name} = ${size} pads to ${to}`]);
    const waves = this.credible(op, kernel, share), sms = this.gpu.sm_count;
    if (waves) idle.push([1 - waves.waveShare, this.waveWords(waves)]);
    else if (!(share > q.tileShare * q.blocks / sms)) idle.push([1 - q.blocks / sms, `${q.blocks} blocks for ${sms} SMs`]);
    const said = idle.filter(([part]) => part >= 0.01 && !(share > q.tileShare))
      .map(([part, words]) => [part, `${words}: ${percent(part)} idle`]);
    const aligned = this.alignment(op);
    if (aligned < 16) said.unshift([1 - Math.exp(-0.25 * (4 - Math.log2(aligned))), `rows are aligned to ${aligned} bytes, not 16`]);
    return said.sort((a, b) => b[0] - a[0]).map(([, words]) => words);
  }
  // Bytes to which all rows of a product are aligned, up to 128.
  alignment(op) {
    const bytes = Object.entries(this.rows(op)).map(([side, step]) => Math.floor(op[side] * 16 / step));
    return Math.min(128, ...bytes.map(row => row & -row));
  }
  // Sides along which rows lie, and what they must be a multiple of to be aligned.
  rows(op) { return this.of(op).format.rows[op.layout]; }
  // The first rule of the number format and library that says that the shape crashes (alignment_rules.broken_by_shape).
  crash(s) {
    const list = ops({...s, direction: s.experts ? 'forward' : 'both'}).filter(op => !op.core && op.name !== 'logits');
    const works = [{'tokens / tp': s.seq * s.mbs / s.tp}, ...list.flatMap(op => op.kind === 'moe' ? groupedGemms(op) : op)];
    return this.entry.crashes.find(rule => s.tp >= rule.min_tp && !(rule.training && s.experts) && works.some(work =>
      (!rule.phases.length || rule.phases.includes(work.phase)) && rule.sides.some(side => work[side] % rule.multiple)));
  }
  // The worst edge that an op has crossed, {us, words}: the time beyond the rate just before the edge (advice.cost).
  waste(op) {
    const now = this.estimate(op), found = [...this[`${op.kind}Edges`](op, now)];
    return found.map(([ideal, words, most = 1]) => ({us: Math.min(most, 1 - ideal / now.us) * now.us, words}))
      .filter(one => one.us >= 0.01 * now.us).sort((a, b) => b.us.toPrecision(6) - a.us.toPrecision(6))[0] || null;
  }
  // The time of an op's arithmetic at the rate with other sizes.
  at(op, changes) {
    const before = {...op, ...changes};
    return this.estimate(before).us * flopsOf(op) / flopsOf(before);
  }
  // Each yields [ideal time, words, largest share that is lost] of the edges that an op of a kind has crossed.
  *softmaxEdges(op, now) {
    yield [now.fused, `Megatron's fused softmax does not run: ${this.bytes(op).objections.join('; ')}`];
  }
  *attentionEdges(op) {
    const width = op.head_dim, bytes = this.of(op).format.bytes, step = 16 / bytes, row = width * bytes, to = cdiv(width, 32) * 32;
    const words = `head_dim = ${width} is no multiple of ${step}: rows aligned to ${row & -row} bytes, not 16`;
    if (width % step) yield [this.at(op, {head_dim: Math.max(step, width - width % step)}), words];
    if (to !== width && to > 32) yield [this.at(op, {head_dim: to - 32}), padWords('head_dim', width, to), 1 - width / to];
  }
  *moeEdges(op) {
    const balanced = {...op, distribution: 'balanced'}, all = op.tokens * op.top_k, rows = Math.max(...tokensPerExpert(balanced));
    const skew = Math.max(...rankRows(op)) / (all / op.ep), fullest = Math.max(...tokensPerExpert(op, page.draws));
    const words = op.ep > 1 ? `the busiest of ${op.ep} GPUs has ${fixed(skew, 2)} times the rows of the mean`
      : `the fullest expert has ${fullest} rows, the mean ${Number((all / op.num_experts).toPrecision(4))}`;
    if (skew > 1 && op.distribution !== 'balanced') yield [this.estimate(balanced).us, `${words} (${op.distribution})`];
    const block = [128, 64].find(size => size <= rows) || 16, to = cdiv(rows, block) * block, padded = padWords('rows of an expert', rows, to);
    const tokens = Math.floor(Math.floor(rows / block) * block * op.num_experts / op.top_k);
    if (to !== rows && tokens) yield [this.at(op, {tokens}), `${padded} (tiles of ${block} rows)`, 1 - rows / to];
  }
  *gemmEdges(op, {us, kernel}) {
    const steps = Object.entries(this.rows(op)).filter(([side, step]) => op[side] % step), name = side => op.sides['mnk'.indexOf(side)];
    const before = Object.fromEntries(steps.map(([side, step]) => [side, Math.max(step, op[side] - op[side] % step)]));
    const said = new Set(steps.map(([side, step]) => `${name(side)} = ${op[side]} is no multiple of ${step}`));
    if (said.size) yield [this.at(op, before), `${[...said].join(', ')}: rows aligned to ${this.alignment(op)} bytes, not 16`];
    const share = this.share(op, us), now = this.credible(op, kernel, share), q = this.quantize(op, kernel), tiles = `(${tileName(q)} tiles)`;
    for (const [side, block] of [['m', q.blockM], ['n', q.blockN]]) {
      const size = op[side], first = Math.floor((size - 1) / block) * block, to = cdiv(size, block) * block;
      for (let below = first; below > 0 && (below === first || below >= size * 0.9); below -= block) {
        const then = this.quantize({...op, [side]: below}, kernel);
        if (below >= size * 0.9 && now && then.waves < now.waves) {
          const words = `${this.waveWords(now)}, and ${name(side)} = ${size} is past ${below} ${tiles}`;
          yield [this.at(op, {[side]: below}), words, Math.max(0, 1 - now.efficiency / then.efficiency)];
          break;
        }
        if (below < first || size % block === 0 || share > q.tileShare) continue;
        yield [this.at(op, {[side]: below}), `${padWords(name(side), size, to)} ${tiles}`, 1 - size / to];
      }
    }
  }
  waveWords(q) { return `wave ${q.waves} of ${q.waves} is ${percent(q.last / this.gpu.sm_count)} full`; }
}

const paddedVocab = (vocab, tp) => cdiv(vocab, 128 * tp) * 128 * tp;
const multiples = (step, low, high) => Array.from({length: high / step}, (_, i) => (i + 1) * step).filter(x => x >= low);
const tileName = t => `${t.blockM}x${t.blockN}${t.splitK > 1 ? ` split-k ${t.splitK}` : ''}`;
const padWords = (name, size, to) => `${name} = ${size} pads to ${to}: ${percent(1 - size / to)} idle`;

// Returns the setting with one size changed. Unless locked, heads of the same width (or as many, wider) and ffn = 4 · hidden follow.
function changed(s, name, value, locks) {
  const next = {...s, [name]: value}, whole = s.heads * s.head_dim === s.hidden;
  const free = size => !locks[size] && size !== name;
  if (name === 'hidden' && free('ffn') && s.ffn === 4 * s.hidden) next.ffn = 4 * value;
  if (name === 'hidden' && whole) Object.assign(next, free('heads') ? {heads: value / s.head_dim} : {head_dim: value / s.heads});
  if (whole && next.hidden % value === 0) {
    if (name === 'heads' && free('head_dim')) next.head_dim = next.hidden / value;
    if (name === 'head_dim' && free('heads')) next.heads = next.hidden / value;
  }
  if (next.heads !== s.heads && free('kv_heads')) next.kv_heads = next.heads / (s.heads / s.kv_heads);
  if (name === 'tp' && free('vocab') && next.vocab % value) next.vocab = paddedVocab(next.vocab, value);
  return next;
}

// Returns the setting at another hidden size with any heads: products do not know them.
function headless(s, hidden, locks) {
  const next = changed(s, 'hidden', hidden, locks), step = s.tp * s.heads / s.kv_heads;
  if (s.heads * s.head_dim !== s.hidden || hidden === s.hidden || hidden < step * s.head_dim) return next;
  return {...next, heads: step, kv_heads: s.tp, head_dim: hidden / step};
}

// Yields {group, joint, s}: shapes near a setting with unlocked sizes changed and as many parameters (advice.space).
function* near(s, locks) {
  const base = parameters(s), names = [...SIZES, ...EXPERT_SIZES];
  const within = next => Math.abs(parameters(next) / base - 1) <= page.space.tolerance;
  for (const [group, change] of changesNear(s)) {
    let next = {...s, ...change};
    const joint = group.startsWith('hidden');
    if (joint && !(within(next) && (next.hidden === s.hidden || locks.layers))) {
      const one = parameters({...next, layers: 1}), each = parameters({...next, layers: 2}) - one;
      next = {...next, layers: Math.max(1, roundEven((base - (one - each)) / each))};
    }
    const changed = names.filter(name => next[name] !== s[name]), kept = !changed.some(name => locks[name]);
    if (within(next) && changed.length && kept && !objection(next)) yield {group, joint, s: next};
  }
}

// Yields [group, sizes that change]: hidden, heads and the MLP at once, or one dimension.
function* changesNear(s) {
  const {hidden_step: step, near, largest_mbs, expert_factor, largest_ep, tolerance} = page.space, wide = step * s.tp;
  if (!s.experts) {
    const vocab = s.vocab % (8 * s.tp) ? paddedVocab(s.vocab, s.tp) : s.vocab;
    const steps = multiples(step, Math.floor((1 - near) * s.hidden), (1 + near) * s.hidden);
    for (const hidden of new Set([s.hidden, ...steps])) {
      if (hidden % s.tp) continue;
      const exact = roundEven(s.ffn / s.hidden * hidden), rounded = Math.max(wide, roundEven(exact / wide) * wide);
      for (const ffn of new Set(exact % s.tp ? [rounded] : [rounded, exact])) {
        for (const heads of headsNear(s, hidden)) yield [`hidden ${hidden}`, {hidden, ffn, vocab, ...heads}];
      }
    }
    for (const heads of headsNear(s, s.hidden)) yield [heads.heads ? 'heads' : 'head_dim', heads];
    for (const ffn of multiples(wide, (1 - near) * s.ffn, (1 + near) * s.ffn)) yield ['ffn', {ffn}];
  }
  yield ['vocab', {vocab: paddedVocab(s.vocab, s.tp)}];
  const batches = [Math.floor(s.mbs / 2), ...multiples(1, 1, Math.log2(largest_mbs)).map(i => s.mbs * 2 ** i)];
  for (const mbs of batches) if (mbs >= 1 && mbs <= largest_mbs) yield ['mbs', {mbs}];
  if (!s.experts) return;
  for (const moe_ffn of multiples(wide, s.moe_ffn / expert_factor, expert_factor * s.moe_ffn)) {
    const by = s.moe_ffn / moe_ffn, experts = roundEven(s.experts * by / s.ep) * s.ep, top_k = roundEven(s.top_k * by);
    const active = top_k * moe_ffn / (s.top_k * s.moe_ffn) - 1;
    if (top_k >= 1 && top_k <= experts && Math.abs(active) <= tolerance) yield ['experts', {moe_ffn, experts, top_k}];
  }
  for (let ep = 1; ep <= largest_ep; ep *= 2) if (s.experts % ep === 0) yield ['ep', {ep}];
  const gpus = s.tp * s.ep, samples = s.mbs * s.ep;
  const degrees = multiples(1, 1, gpus).filter(ep => gpus % ep === 0 && samples % ep === 0);
  for (const ep of degrees) yield ['tp and ep', {tp: gpus / ep, ep, mbs: samples / ep}];
}

// Heads of a hidden size, of usual widths, or as many of the next aligned one; none if heads · head_dim is not hidden.
function headsNear(s, hidden) {
  if (s.heads * s.head_dim !== s.hidden) return [{}];
  const {head_dims, heads: factor} = page.space, own = kvHeads(s), group = s.heads / own;
  const found = hidden === s.hidden && s.head_dim % 8 ? [{head_dim: cdiv(s.head_dim, 8) * 8}] : [];
  for (const width of new Set([...head_dims, s.head_dim])) {
    const heads = hidden / width, few = factor * heads >= s.heads && heads <= factor * s.heads;
    if (!Number.isInteger(heads) || heads % s.tp || !few || width % 8 || (s.kv_rank && width < s.rope_dim)) continue;
    const splits = kv => kv && heads % kv === 0 && (kv % s.tp === 0 || (kv === own && s.tp % kv === 0));
    const kv = [heads % group ? 0 : heads / group, own].find(splits);
    if (kv) found.push({heads, kv_heads: kv, head_dim: width});
  }
  return found;
}

// Of shapes of one group the preferred one (advice.search); joint ones are surely faster if any is.
function preferred(group, all) {
  const sure = all[0].joint ? all.filter(one => one.sure) : [], among = sure.length ? sure : all;
  const least = Math.min(...among.map(one => one.each)), {as_good, line_elements} = page.space;
  const heads = all[0].joint || group === 'heads';
  const rank = ({s}) => group === 'mbs' ? s.mbs : heads ? -Math.min(line_elements, s.head_dim & -s.head_dim) : 0;
  return among.filter(one => one.each <= least * (1 + as_good)).sort((a, b) => rank(a) - rank(b) || a.each - b.each)[0];
}

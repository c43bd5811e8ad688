// Ops of a transformer, tiles and waves, edges, sums and neighbours: the arithmetic of quantbench.workload,
// quantization, advice and sweep.axes for one setting, tested against them on random settings (tests/explore).
'use strict';

const cdiv = (a, b) => Math.ceil(a / b);
// Rounds as Python's format does: exact halves to even.
const fixed = (x, d) => {
  const t = x * 10 ** d, low = Math.floor(t);
  return t - low === 0.5 && Number.isInteger(x * 2 ** 20) ? ((low % 2 ? low + 1 : low) / 10 ** d).toFixed(d) : x.toFixed(d);
};
const percent = share => `${fixed(100 * share, Math.abs(100 * share) >= 9.95 ? 0 : 1)} %`;
const signed = share => `${share < 0 ? '−' : '+'}${percent(Math.abs(share))}`;
const digits = value => fixed(value, value > 0 ? Math.max(0, 2 - Math.floor(Math.log10(value))) : 0);
const latency = us => us < 999.5 ? `${digits(us)} µs` : us / 1e3 < 999.5 ? `${digits(us / 1e3)} ms` : `${digits(us / 1e6)} s`;

const SIZES = ['hidden', 'heads', 'kv_heads', 'head_dim', 'ffn', 'seq', 'mbs', 'tp', 'vocab', 'layers'];
const EXPERT_SIZES = ['experts', 'top_k', 'moe_ffn', 'ep', 'shared_ffn', 'dense_layers'], LATENT_SIZES = ['kv_rank', 'q_rank', 'rope_dim', 'value_dim'];
const LARGEST = 2 ** 21 - 1, MOST_EXPERTS = 1024;  // LARGEST_SIDE of latency.gemm; experts whose routing is in the page

// Returns what makes a shape impossible (TransformerShape's conditions), or ''.
function objection(s) {
  for (const name of [...SIZES, ...EXPERT_SIZES, ...LATENT_SIZES]) {
    const low = SIZES.includes(name) || (s.experts && ['top_k', 'moe_ffn', 'ep'].includes(name)) || (s.kv_rank && name === 'value_dim') ? 1 : 0;
    if (!(Number.isInteger(s[name]) && s[name] >= low)) return `${name} = ${s[name]} must be a whole number of at least ${low}`;
  }
  const kv = kvHeads(s);
  if (s.heads % kv) return `kv_heads = ${kv} must divide heads = ${s.heads}`;
  for (const name of ['heads', 'ffn', 'vocab']) if (s[name] % s.tp) return `tp = ${s.tp} must divide ${name} = ${s[name]}`;
  if (kv % s.tp && s.tp % kv) return `one of kv_heads = ${kv} and tp = ${s.tp} must divide the other`;
  if (s.experts > MOST_EXPERTS) return `experts = ${s.experts}: at most ${MOST_EXPERTS} are drawn`;
  if (s.experts && s.top_k > s.experts) return `top_k = ${s.top_k} must be at most experts = ${s.experts}`;
  if (s.experts && s.experts % s.ep) return `ep = ${s.ep} must divide experts = ${s.experts}`;
  for (const name of s.experts ? ['moe_ffn', 'shared_ffn'] : []) if (s[name] % s.tp) return `tp = ${s.tp} must divide ${name} = ${s[name]}`;
  if (s.experts && s.dense_layers >= s.layers) return `dense_layers = ${s.dense_layers} must be less than layers = ${s.layers}`;
  if (s.kv_rank && s.rope_dim > s.head_dim) return `rope_dim = ${s.rope_dim} must be at most head_dim = ${s.head_dim}`;
  for (const op of ops(s)) {
    const side = op.kind === 'gemm' ? Math.max(op.m, op.n, op.k) : 0;
    if (side > LARGEST) return `${op.name} has a side of ${side}: no time is predicted above ${LARGEST}`;
  }
  return '';
}

// Key/value heads; with latent attention each head has its own.
const kvHeads = s => s.kv_rank ? s.heads : s.kv_heads;
// Width of a head's values, and of heads whose attention has the FLOPs of this one.
const valueWidth = s => s.kv_rank ? s.value_dim : s.head_dim;
const coreDim = s => Math.floor((s.head_dim + valueWidth(s)) / 2);

// Products before attention on one of `tp` GPUs: name, columns, reduction, and what these two are called.
function qkv(s, tp) {
  const heads = s.heads / tp;
  if (!s.kv_rank) return [['qkv', (heads + 2 * Math.max(1, Math.floor(s.kv_heads / tp))) * s.head_dim, s.hidden, 'qkv width / tp', 'hidden']];
  return [['latent_down', s.q_rank + s.kv_rank + s.rope_dim, s.hidden, 'q_rank + kv_rank + rope_dim', 'hidden'],
    ['q_up', heads * s.head_dim, s.q_rank || s.hidden, 'heads · head_dim / tp', 'q_rank or hidden'],
    ['kv_up', heads * (s.head_dim - s.rope_dim + s.value_dim), s.kv_rank, 'heads · (head_dim - rope_dim + value_dim) / tp', 'kv_rank']];
}

// Returns the ops of one GPU: {name, kind, phase, count, …}; layout 0 nn, 1 nt, 2 tn; core: in attention's number format.
// Logits too wide for the models are left out; of layers with experts there is a forward pass only.
function ops(s) {
  const heads = s.heads / s.tp, kv = Math.max(1, Math.floor(kvHeads(s) / s.tp)), batch = s.mbs * heads, dense = s.experts ? s.dense_layers : s.layers;
  const all = {phase: 'forward', count: s.layers}, core = {...all, core: true, batch}, inner = {...core, kind: 'gemm'};
  const gemm = (name, n, k, ...sides) => ({...all, name, kind: 'gemm', m: s.seq * s.mbs, n, k, batch: 1, layout: 1, sides: ['tokens', ...sides]});
  const mlp = (name, size, count) => {
    const ffn = s[size] / s.tp, up = s.gated && s.gate_fused ? [gemm(`${name}_up_gate`, 2 * ffn, s.hidden, `2 · ${size} / tp`, 'hidden')]
      : ['up', ...(s.gated ? ['gate'] : [])].map(side => gemm(`${name}_${side}`, ffn, s.hidden, `${size} / tp`, 'hidden'));
    return ffn && count ? [...up, gemm(`${name}_down`, s.hidden, ffn, 'hidden', `${size} / tp`)].map(op => ({...op, count})) : [];
  };
  const attention = s.attention === 'flash' ? [{...core, name: 'attention', kind: 'attention', batch: s.mbs, heads, kv, seq: s.seq, headDim: coreDim(s)}] : [
    {...inner, name: 'scores', m: s.seq, n: s.seq, k: s.head_dim, layout: 1, sides: ['seq', 'seq', 'head_dim']},
    {...core, name: 'softmax', kind: 'softmax', seq: s.seq, mbs: s.mbs, heads},
    {...inner, name: 'context', m: s.seq, n: valueWidth(s), k: s.seq, layout: 0, sides: ['seq', 'head_dim', 'seq']}];
  const forward = [
    ...qkv(s, s.tp).map(one => gemm(...one)), ...attention, gemm('proj', s.hidden, heads * valueWidth(s), 'hidden', 'heads · head_dim / tp'),
    ...mlp('mlp', 'ffn', dense),
    ...(s.experts ? [...mlp('shared', 'shared_ffn', s.layers - dense), {...all, name: 'experts', kind: 'experts', count: s.layers - dense, tokens: s.seq * s.mbs * s.ep,
      hidden: s.hidden, ffn: s.moe_ffn, gated: s.gated, tp: s.tp, ep: s.ep, experts: s.experts, topK: s.top_k, routing: s.routing}] : []),
    ...(s.vocab / s.tp > LARGEST ? [] : [{...gemm('logits', s.vocab / s.tp, s.hidden, 'vocab / tp', 'hidden'), count: 1}]),
  ];
  return s.direction === 'both' && !s.experts ? [...forward, ...forward.slice().reverse().flatMap(backward)] : forward;
}

function backward(op) {
  if (op.kind !== 'gemm') return [{...op, phase: 'backward'}];
  const {m, n, k, sides: [a, b, c]} = op, weight = {...op, phase: 'wgrad', layout: 2};
  return [{...op, phase: 'dgrad', n: k, k: n, layout: 1 - op.layout, sides: [a, c, b]},
    op.layout ? {...weight, m: n, n: k, k: m, sides: [b, c, a]} : {...weight, m: k, k: m, sides: [c, b, a]}];
}

const label = op => op.phase === 'forward' ? op.name : `${op.name}.${op.phase}`;
// The layer alone, each op once: of a model with experts, a layer that has them.
const layerOf = s => ops(s).filter(op => op.name !== 'logits' && !(s.experts && op.name.startsWith('mlp_')));

function flopsOf(op) {
  if (op.kind === 'gemm') return 2 * op.batch * op.m * op.n * op.k;
  if (op.kind === 'attention') return 2 * op.batch * op.heads * op.seq * (op.seq + 1) * op.headDim * (op.phase === 'backward' ? 2.5 : 1);
  if (op.kind === 'experts') return 2 * Math.max(...rankRows(op)) * op.hidden * op.ffn / op.tp * (op.gated ? 3 : 2);
  return 0;  // a softmax: its share is that of the memory's bandwidth
}

function rankRows(op) {
  const rows = tokensPerExpert(op, page.draws), local = op.experts / op.ep;
  return Array.from({length: op.ep}, (_, r) => rows.slice(r * local, (r + 1) * local).reduce((a, b) => a + b, 0));
}

// Bytes that a causal softmax moves in one kernel, and in separate ones (workload.Softmax, latency.softmax).
function softmaxBytes({batch, seq, mbs, phase}, width) {
  const all = batch * seq * seq, live = batch * seq * (seq + 1) / 2;
  return phase === 'backward' ? [width * (2 * live + all), all * (16 + width)] : [width * (live + all), all * (24 + 2 * width) + mbs * seq * seq];
}

// Reasons why Megatron's fused softmax does not run (megatron.softmax_objections).
function softmaxObjections({batch, heads, mbs, seq}, dtype) {
  const last = seq <= 2048, columns = 2 ** Math.ceil(Math.log2(seq)), perBlock = 128 / Math.min(columns, 32) * (columns <= 128 ? 2 : 1);
  return [
    dtype === 'fp32' && 'dtype fp32 is neither fp16 nor bf16',
    !(seq >= 17 && seq <= (last ? 2048 : 16384)) && `sk = ${seq} is not from 17 to ${last ? 2048 : 16384}`,
    !last && seq % 4 && `sk = ${seq} is not a multiple of 4`, seq % 4 && `sq = ${seq} is not a multiple of 4`,
    batch % perBlock && `heads per GPU ${heads} · MBS ${mbs} = ${batch} is not a multiple of ${perBlock}`,
  ].filter(Boolean);
}

// The models of one GPU, number format and library; `core`: those of its attention's number format.
class Times {
  constructor(gpu, entry, formats, core) {
    Object.assign(this, {gpu, entry, format: formats[entry.dtype], core: core || this});
    this.peak = gpu.peaks[entry.dtype];
    this.waves = entry.gemm.in_waves;
  }

  // Whether all models of a setting's ops rest on measurements.
  measured(s) {
    return this.entry.gemm.rows > 0 && this.core.entry.gemm.rows > 0 && !(s.experts && !this.entry.experts.rows);
  }

  estimate(op) {
    if (op.core && this.core !== this) return this.core.estimate(op);
    const {gemm, attention, softmax, experts, dtype} = this.entry;
    if (op.kind === 'attention') return attention.predict(op.batch, op.heads, op.kv, op.seq, op.headDim, op.phase === 'backward');
    if (op.kind === 'experts') return experts.predict(op, page.load_draws);
    if (op.kind === 'softmax') {
      const [bytes, all] = softmaxBytes(op, this.format.bytes), separate = softmaxObjections(op, dtype).length ? all : bytes;
      return softmax.predict({bytes, separate, rows: op.batch * op.seq, columns: op.seq});
    }
    const batch = Math.min(op.batch, Math.floor(LARGEST / op.m)), by = op.batch / batch;
    const found = gemm.predict(op.m, op.n, op.k, batch, op.layout);
    if (op.batch === 1) return found;
    const [us, low, high] = [by * found.us, by * found.low, by * found.high];
    if (!['fp16', 'bf16'].includes(dtype) || !this.gpu.peaks.fp32 || [op.m, op.n, op.k].every(side => side % 8 === 0)) return {...found, us, low, high};
    // Unaligned batches: latency.op_times.as_run.
    const {share, spread} = page.unaligned, slow = Math.max(us, flopsOf(op) / (this.gpu.peaks.fp32 * 1e6 * share));
    return {...found, us: slow, low: Math.max(slow / spread, low), high: slow * spread};
  }

  share(op, us) {
    if (op.core && this.core !== this) return this.core.share(op, us);
    if (op.kind === 'softmax') return softmaxBytes(op, this.format.bytes)[0] / us / this.gpu.bytes_per_us;
    return this.peak ? flopsOf(op) / us / 1e6 / this.peak : null;
  }

  // Returns {us, low, high, share, flops} of a setting's layer without logits, as `quantbench predict` sums it, or of a
  // list of its ops.
  layer(s, list = layerOf(s)) {
    let us = 0, below = 0, above = 0, below2 = 0, above2 = 0, peaked = 0, flops = 0;
    for (const op of list) {
      const one = this.estimate(op), [low, high] = [one.us - one.low, one.high - one.us];
      us += one.us;
      flops += flopsOf(op);
      if (op.kind !== 'softmax') peaked += (this.share(op, one.us) ?? NaN) * one.us;
      below += low; above += high; below2 += low ** 2; above2 += high ** 2;
    }
    const correlation = this.measured(s) ? 0.5 : 1;
    const joined = (sum, squares) => Math.sqrt((1 - correlation) * squares + correlation * sum ** 2);
    return {us, low: us - joined(below, below2), high: us + joined(above, above2), share: peaked / us, flops};
  }

  // Tiles and waves of a GEMM with the kernel that the model chooses.
  quantize(op, kernel, withSplit = true) {
    const t = this.entry.gemm.tile(kernel), split = withSplit ? t.splitK : 1;
    const tilesM = cdiv(op.m, t.blockM), tilesN = cdiv(op.n, t.blockN), blocks = op.batch * tilesM * tilesN * split;
    const sms = this.gpu.sm_count, waves = cdiv(blocks, sms);
    const tileShare = op.m * op.n / (tilesM * t.blockM * tilesN * t.blockN), waveShare = blocks / (waves * sms);
    return {...t, tilesM, tilesN, blocks, waves, last: blocks - (waves - 1) * sms, tileShare, waveShare,
      efficiency: tileShare * waveShare};
  }

  // The same, or null where waves cannot be stated (quantization.credible_waves).
  credible(op, kernel, share) {
    if (!this.waves || this.entry.gemm.tile(kernel).held !== 1) return null;
    const found = this.quantize(op, kernel);
    return share !== null && share > found.efficiency ? null : found;
  }

  // Reasons why an op runs below peak, as analysis.blocks.idle_reasons words them.
  reasons(op) {
    if (op.core && this.core !== this) return this.core.reasons(op);
    if (op.kind === 'attention') {
      return op.headDim % 8 ? [{share: 0, words: `head_dim = ${op.headDim} is not a multiple of 8`}] : [];
    }
    if (op.kind !== 'gemm') return [];
    const {us, kernel} = this.estimate(op), share = this.share(op, us), found = [];
    const q = this.quantize(op, kernel);
    for (const [name, size, block] of [['m', op.m, q.blockM], ['n', op.n, q.blockN]]) {
      const padded = cdiv(size, block) * block;
      found.push({share: 1 - size / padded, words: `${name} = ${size} pads to ${padded}`});
    }
    const used = found.reduce((a, one) => a * (1 - one.share), 1), room = part => share === null || share <= part;
    const idle = [];
    if (room(used)) {
      idle.push(...found);
      const waves = this.credible(op, kernel, share), sms = this.gpu.sm_count;
      if (waves) idle.push({share: 1 - waves.waveShare, words: waveWords(waves, sms)});
      else if (room(used * q.blocks / sms)) idle.push({share: 1 - q.blocks / sms, words: `${q.blocks} blocks for ${sms} SMs`});
    }
    const said = idle.filter(one => one.share >= 0.01).sort((a, b) => b.share - a.share)
      .map(one => ({share: one.share, words: `${one.words}: ${percent(one.share)} idle`}));
    const aligned = this.alignment(op);
    if (aligned < 16) said.push({share: 0, words: `rows are aligned to ${aligned} bytes, not 16`});
    return said;
  }

  alignment(op) {
    const bytes = (length, of) => { const row = Math.floor(length * of.bytes / of.packed); return Math.min(128, row & -row); };
    const [a, b] = this.rowSides(op);
    return Math.min(bytes(op[a], this.format), bytes(op[b], this.format), bytes(op.n, {bytes: this.format.output, packed: 1}));
  }

  // workload.ops.Gemm.row_sides
  rowSides(op) {
    const {bytes, packed, output} = this.format;
    return bytes / packed < output || op.layout === 1 ? ['k', 'k'] : [op.layout ? 'm' : 'k', 'n'];
  }

  // The worst edge that an op has crossed, {us, words}: the time beyond the rate just before the edge (advice.cost).
  waste(op) {
    if (op.core && this.core !== this) return this.core.waste(op);
    const now = this.estimate(op), found = [];
    const lost = (ideal, words, most) => {
      const share = Math.min(most, 1 - ideal / now.us);
      if (share >= 0.01) found.push({us: share * now.us, words});
    };
    const add = (before, words, most) => lost(this.estimate(before).us * flopsOf(op) / flopsOf(before), words, most);
    if (op.kind === 'attention') {
      const to = cdiv(op.headDim, 32) * 32, step = 16 / this.format.bytes, down = op.headDim % step ? Math.max(step, op.headDim - op.headDim % step) : 0;
      const row = op.headDim * this.format.bytes;
      if (down) add({...op, headDim: down}, `head_dim = ${op.headDim} is no multiple of ${step}: rows aligned to ${row & -row} bytes, not 16`, 1);
      if (to !== op.headDim && to > 32) add({...op, headDim: to - 32}, `head_dim = ${op.headDim} pads to ${to}: ${percent(1 - op.headDim / to)} idle`, 1 - op.headDim / to);
    } else if (op.kind === 'softmax') {
      lost(now.fused, `Megatron's fused softmax does not run: ${softmaxObjections(op, this.entry.dtype).join('; ')}`, 1);
    } else if (op.kind === 'experts') this.expertEdges(op, add, lost);
    else {
      this.unaligned(op, add);
      this.tileEdges(op, now, add);
    }
    return found.sort((a, b) => b.us.toPrecision(6) - a.us.toPrecision(6))[0] || null;
  }

  expertEdges(op, add, lost) {
    const balanced = {...op, routing: 'balanced'}, total = op.tokens * op.topK;
    const skew = Math.max(...rankRows(op)) / (total / op.ep), rows = Math.max(...tokensPerExpert(balanced));
    if (skew > 1 && op.routing !== 'balanced') {
      const words = op.ep === 1 ? `the fullest expert has ${Math.max(...tokensPerExpert(op, page.draws))} rows, the mean ${Number((total / op.experts).toPrecision(4))}`
        : `the busiest of ${op.ep} GPUs has ${fixed(skew, 2)} times the rows of the mean`;
      lost(this.estimate(balanced).us, `${words} (${op.routing})`, 1);
    }
    const block = [128, 64].find(size => size <= rows) || 16, to = cdiv(rows, block) * block;
    const tokens = Math.floor(Math.floor(rows / block) * block * op.experts / op.topK);
    if (to !== rows && tokens) add({...op, tokens}, `rows of an expert = ${rows} pads to ${to}: ${percent(1 - rows / to)} idle (tiles of ${block} rows)`, 1 - rows / to);
  }

  unaligned(op, add) {
    const step = 16 * this.format.packed / this.format.bytes, rows = Object.fromEntries(this.rowSides(op).map(side => [side, step]));
    rows.n = Math.max(rows.n || 1, 16 / this.format.output);
    const off = Object.keys(rows).filter(side => op[side] % rows[side]);
    if (!off.length) return;
    const before = {...op};
    for (const side of off) before[side] = Math.max(rows[side], op[side] - op[side] % rows[side]);
    const names = {m: op.sides[0], n: op.sides[1], k: op.sides[2]};
    const said = off.map(side => `${names[side]} = ${op[side]} is no multiple of ${rows[side]}`);
    add(before, `${[...new Set(said)].join(', ')}: rows aligned to ${this.alignment(op)} bytes, not 16`, 1);
  }

  tileEdges(op, {us, kernel}, add) {
    const share = this.share(op, us), now = this.credible(op, kernel, share), t = this.entry.gemm.tile(kernel);
    const q = this.quantize(op, kernel), pads = share === null || share <= q.tileShare;
    for (const [side, block, name] of [['m', t.blockM, op.sides[0]], ['n', t.blockN, op.sides[1]]]) {
      const size = op[side], first = Math.floor((size - 1) / block) * block;
      for (let below = first; below > 0; below -= block) {
        const near = below >= size * 0.9;
        if (!near && below !== first) break;
        const shorter = {...op, [side]: below}, then = this.quantize(shorter, kernel);
        if (near && now && then.waves < now.waves) {
          add(shorter, `${waveWords(now, this.gpu.sm_count)}, and ${name} = ${size} is past ${below} (${tileName(t)} tiles)`,
            Math.max(0, 1 - now.efficiency / then.efficiency));
          break;
        }
        if (below === first && size % block && pads) {
          const to = cdiv(size, block) * block;
          add(shorter, `${name} = ${size} pads to ${to}: ${percent(1 - size / to)} idle (${tileName(t)} tiles)`, 1 - size / to);
        }
      }
    }
  }
}

const tileName = t => `${t.blockM}x${t.blockN}${t.splitK > 1 ? ` split-k ${t.splitK}` : ''}`;
const waveWords = (q, sms) => `wave ${q.waves} of ${q.waves} is ${percent(q.last / sms)} full`;

// Returns the setting with one size changed, and what follows it unless it is locked: heads (of about the same width)
// and ffn = 4 · hidden follow hidden, key/value heads keep their ratio to heads. heads = 0: hidden has no such heads.
function changed(s, name, value, locks) {
  const next = {...s, [name]: value};
  const free = size => !locks[size] && size !== name;
  const whole = s.heads * s.head_dim === s.hidden;
  if (name === 'hidden' && free('ffn') && s.ffn === 4 * s.hidden) next.ffn = 4 * value;
  if (name === 'hidden' && whole && value !== s.hidden) Object.assign(next, headsFor(s, value, free));
  if (name === 'heads' && whole && free('head_dim') && next.hidden % value === 0) next.head_dim = next.hidden / value;
  if (name === 'head_dim' && whole && free('heads') && next.hidden % value === 0) next.heads = next.hidden / value;
  if (next.heads !== s.heads && free('kv_heads')) next.kv_heads = next.heads / (s.heads / s.kv_heads);
  if (name === 'tp' && free('vocab') && next.vocab % value) next.vocab = paddedVocab(next.vocab, value);
  return next;
}

// Heads of another hidden size: a width that is a multiple of 8 and nearest to the present one, a number that tp and the
// ratio of key/value heads divide.
function headsFor(s, hidden, free) {
  const group = free('kv_heads') ? s.heads / s.kv_heads : 1;
  const fits = width => {
    const heads = hidden / width;
    return Number.isInteger(heads) && heads % s.tp === 0 && heads % group === 0 &&
      (free('kv_heads') ? (heads / group) % s.tp === 0 || s.tp % (heads / group) === 0 : heads % s.kv_heads === 0);
  };
  if (!free('heads')) return {head_dim: free('head_dim') ? hidden / s.heads : s.head_dim};
  if (!free('head_dim')) return {heads: fits(s.head_dim) ? hidden / s.head_dim : 0};
  for (let off = 0; off <= 128; off += 1) {
    for (const width of [s.head_dim + off, s.head_dim - off]) {
      if (width % 8 === 0 && width >= 48 && width <= 256 && fits(width)) return {heads: hidden / width, head_dim: width};
    }
  }
  return {heads: 0};
}

const paddedVocab = (vocab, tp) => cdiv(vocab, 128 * tp) * 128 * tp;

// Weights of the model without biases and norms, and those of all routed experts among them.
function weights(s) {
  const attention = qkv(s, 1).reduce((sum, [, n, k]) => sum + n * k, s.heads * valueWidth(s) * s.hidden);
  const matrices = (s.gated ? 3 : 2) * s.hidden, dense = s.experts ? s.dense_layers : s.layers, sparse = s.layers - dense;
  const routed = sparse * s.experts * matrices * s.moe_ffn, others = sparse * (matrices * s.shared_ffn + s.experts * s.hidden);
  const embeddings = s.vocab * s.hidden * (s.tied ? 1 : 2);
  return {routed, all: s.layers * attention + dense * matrices * s.ffn + routed + others + embeddings};
}

function parameters(s) {
  const small = s.gated ? 2 * s.hidden : (s.heads + 2 * kvHeads(s)) * s.head_dim + s.ffn + 6 * s.hidden;
  return weights(s).all + s.layers * small + (s.gated ? 1 : 2) * s.hidden;
}

// Whether the weights of a model with experts leave memory on each of its GPUs.
function fits(s, gpu, format) {
  const {all, routed} = weights(s);
  return !s.experts || (all - routed + routed / s.ep) / s.tp * format.weight < gpu.memory_bytes;
}

// Yields {group, joint, s}: shapes near a setting with unlocked sizes changed and as many parameters, the space of
// `quantbench advise` (advice.space; its limits are page.space). Of each group one is chosen: of a hidden size if the
// sizes change jointly, else of the dimension that changes.
function* near(s, locks) {
  const base = parameters(s), within = next => Math.abs(parameters(next) / base - 1) <= page.space.tolerance;
  const names = [...SIZES, ...EXPERT_SIZES];
  const allowed = next => names.some(name => next[name] !== s[name]) &&
    names.every(name => !locks[name] || next[name] === s[name]) && !objection(next);
  for (const change of s.experts ? [] : together(s)) {
    let next = {...s, ...change};
    if (!(within(next) && (next.hidden === s.hidden || locks.layers))) {
      const one = parameters({...next, layers: 1}), each = parameters({...next, layers: 2}) - one;
      next = {...next, layers: Math.max(1, roundEven((base - (one - each)) / each))};
    }
    if (within(next) && allowed(next)) yield {group: `hidden ${next.hidden}`, joint: true, s: next};
  }
  for (const [group, changes] of Object.entries(alone(s))) for (const change of changes) {
    const next = {...s, ...change};
    if (within(next) && allowed(next)) yield {group, joint: false, s: next};
  }
}

// Changes of hidden, heads and the MLP at once.
function* together(s) {
  const {hidden_step: step, near} = page.space, wide = step * s.tp, hiddens = new Set([s.hidden]);
  const vocab = s.vocab % (8 * s.tp) ? paddedVocab(s.vocab, s.tp) : s.vocab;
  for (let h = cdiv(Math.floor((1 - near) * s.hidden), step) * step; h <= (1 + near) * s.hidden; h += step) hiddens.add(h);
  for (const hidden of hiddens) {
    if (hidden % s.tp) continue;
    const exact = roundEven(s.ffn / s.hidden * hidden), rounded = Math.max(wide, roundEven(exact / wide) * wide);
    for (const ffn of new Set(exact % s.tp ? [rounded] : [rounded, exact])) {
      for (const heads of headsNear(s, hidden)) yield {hidden, ffn, vocab, ...heads};
    }
  }
}

// Heads of a hidden size, of usual widths; no change if heads · head_dim is not hidden.
function headsNear(s, hidden) {
  if (s.heads * s.head_dim !== s.hidden) return [{}];
  const {head_dims, heads: most} = page.space, found = [], own = kvHeads(s), group = s.heads / own;
  for (const width of new Set([...head_dims, s.head_dim])) {
    const heads = hidden / width;
    if (!Number.isInteger(heads) || heads % s.tp || most * heads < s.heads || heads > most * s.heads || width % 8) continue;
    if (s.kv_rank && width < s.rope_dim) continue;
    const splits = kv => kv && heads % kv === 0 && (kv % s.tp === 0 || (kv === own && s.tp % kv === 0));
    const kv = [heads % group ? 0 : heads / group, own].find(splits);
    if (kv) found.push({heads, kv_heads: kv, head_dim: width});
  }
  return found;
}

// Changes of one dimension: the micro-batch, the vocabulary, heads, the MLP; of experts their width, ep, or tp and ep.
function alone(s) {
  const {hidden_step, near, most_mbs, expert_factor, most_ep, tolerance} = page.space, wide = hidden_step * s.tp;
  const multiples = (step, low, high) => Array.from({length: Math.floor(high / step)}, (_, i) => (i + 1) * step).filter(x => x >= low);
  const divisors = (n, most) => multiples(1, 1, most).filter(x => n % x === 0);
  const batches = [Math.floor(s.mbs / 2), ...multiples(1, 1, Math.log2(most_mbs)).map(i => s.mbs * 2 ** i)];
  const changes = {
    vocab: [{vocab: paddedVocab(s.vocab, s.tp)}],
    mbs: batches.filter(mbs => mbs >= 1 && mbs <= most_mbs).map(mbs => ({mbs})),
  };
  if (!s.experts) return {...changes, heads: headsNear(s, s.hidden), ffn: multiples(wide, (1 - near) * s.ffn, (1 + near) * s.ffn).map(ffn => ({ffn}))};
  const gpus = s.tp * s.ep, samples = s.mbs * s.ep;
  const resized = moe_ffn => ({moe_ffn, experts: roundEven(s.experts * s.moe_ffn / moe_ffn / s.ep) * s.ep, top_k: roundEven(s.top_k * s.moe_ffn / moe_ffn)});
  const asActive = one => Math.abs(one.top_k * one.moe_ffn / (s.top_k * s.moe_ffn) - 1) <= tolerance;
  changes.experts = multiples(wide, s.moe_ffn / expert_factor, expert_factor * s.moe_ffn).map(resized)
    .filter(one => one.top_k >= 1 && one.top_k <= one.experts && asActive(one));
  changes.ep = divisors(s.experts, most_ep).filter(ep => (ep & (ep - 1)) === 0).map(ep => ({ep}));
  changes['tp and ep'] = divisors(gpus, gpus).filter(ep => samples % ep === 0).map(ep => ({tp: gpus / ep, ep, mbs: samples / ep}));
  return changes;
}

// Of shapes of one group the preferred one (neighbours._choose): among surely faster ones if there are any and the sizes
// change jointly; of those that are as fast, the smallest micro-batch, which takes the least memory, or the best aligned
// heads.
function preferred(group, all) {
  const sure = all[0].joint ? all.filter(one => one.sure) : [], among = sure.length ? sure : all;
  const least = Math.min(...among.map(one => one.each)), good = among.filter(one => one.each <= least * (1 + page.space.as_good));
  const heads = all[0].joint || group === 'heads';
  const rank = ({s}) => group === 'mbs' ? s.mbs : heads ? -Math.min(page.space.line_elements, s.head_dim & -s.head_dim) : 0;
  return good.sort((a, b) => rank(a) - rank(b) || a.each - b.each)[0];
}

const state = {head: DATA.head, share: DATA.share};
const SVG = 'http://www.w3.org/2000/svg', WIDE = 560, TALL = 200, LEFT = 46, RIGHT = 550, LOW = 172, HIGH = 20;
const number = (v, n = 3) => v === null ? 'none' : String(+v.toPrecision(n)).replace('-', '−');
const name = i => `L${DATA.layers[DATA.heads[i][0]]}H${DATA.heads[i][1]}`;
const shares = () => DATA.shares[state.share];
/* The band of a head with the largest share, and the code of that share. */
const best = i => { const values = shares().bands[i].map(v => v ?? 0); return values.indexOf(Math.max(...values)); };
const bandCode = (i, b) => `planes.by_band().total_${state.share}[${i}, ${b}]`;
const grid = new Map(DATA.heads.map(([row, head], i) => [row * DATA.count + head, i]));

make('h1', DATA.title);
make('p', DATA.caption, {class: 'how'});
const tools = make('div', null, {class: 'row'}), pick = make('label', 'share of ', null, tools);
const choose = make('select', null, {'aria-label': 'share'}, pick);
for (const [value, said] of [['cs', 'the covariance of scores'], ['gs', 'gain (where attention goes)']]) make('option', said, {value}, choose);
choose.value = state.share;
DATA.bands.forEach(([band, said, colour]) => {
  const key = make('span', null, {class: 'key'}, tools);
  make('i', null, {style: `background:${colour}`}, key); make('span', `${band}: ${said}`, null, key);
});
const both = make('div', null, {class: 'both'});
const atlas = make('div', null, {class: 'atlas', role: 'group', 'aria-label': 'heads by layer', style: `grid-template-columns:22px repeat(${DATA.count},minmax(8px,1fr))`}, both);
const cells = [];
DATA.layers.forEach((layer, row) => {
  make('span', layer, {class: 'axis'}, atlas);
  for (let head = 0; head < DATA.count; head++) {
    const i = grid.get(row * DATA.count + head);
    if (i === undefined) { make('span', null, null, atlas); continue; }
    cells[i] = make('button', null, {type: 'button', tabindex: -1}, atlas);
    offer(cells[i], () => bandCode(i, best(i)));
    cells[i].onclick = () => show(i);
    cells[i].onkeydown = event => step(event, row, head);
  }
});
make('span', '', {class: 'axis'}, atlas);
for (let head = 0; head < DATA.count; head++) make('span', DATA.count > 16 && head % 4 ? '' : head, {class: 'axis'}, atlas);
const side = make('div', null, {class: 'side', 'aria-live': 'polite'}, both);

/* The line of code is that of the number under the mouse, else that of the last one clicked. */
function offer(node, code) {
  node.onpointerenter = () => state.code.show(code());
  node.onpointerleave = () => state.code.show(state.kept);
  node.onclick = () => { state.kept = code(); };
}
function step(event, row, head) {
  const by = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
  const to = by && head + by[1] >= 0 && head + by[1] < DATA.count ? grid.get((row + by[0]) * DATA.count + head + by[1]) : undefined;
  if (by) event.preventDefault();
  if (to !== undefined) { show(to); cells[to].focus(); }
}
function colour() {
  cells.forEach((cell, i) => {
    const [band, , hue] = DATA.bands[best(i)], value = shares().bands[i][best(i)] ?? 0;
    const strength = 15 + 85 * Math.min(1, Math.max(0, value));  // of 1, which is all of a head
    cell.style.background = `color-mix(in srgb, ${hue} ${strength}%, var(--paper))`;
    cell.dataset.band = band; cell.dataset.value = value;
    cell.title = `${name(i)}: ${band} ${number(value)}`;
    cell.setAttribute('aria-label', cell.title);
  });
}

const board2 = (said, low, high) => {
  const svg = add(side, 'svg', {viewBox: `0 0 ${WIDE} ${TALL}`, role: 'img', 'aria-label': said});
  const y = v => LOW - (v - low) / (high - low || 1) * (LOW - HIGH);
  const digits = high - low >= 20 ? 0 : high - low >= 1 ? 1 : 2;
  for (const v of new Set([low, 0, high])) {
    if (v !== 0 && Math.abs(y(v) - y(0)) < 12) continue;
    add(svg, 'text', {x: LEFT - 5, y: y(v) + 4, 'text-anchor': 'end'}, v ? v.toFixed(digits).replace('-', '−') : '0');
  }
  add(svg, 'line', {x1: LEFT, x2: RIGHT, y1: y(0), y2: y(0), class: 'zero'});
  return [svg, y];
};
function upright(svg, x, said, anchor = 'start') {
  add(svg, 'line', {x1: x, x2: x, y1: HIGH, y2: LOW, class: 'mark'});
  add(svg, 'text', {x: x + (anchor === 'start' ? 3 : -3), y: HIGH - 6, 'text-anchor': anchor}, said);
}

/* Bars of the planes of a head, on a logarithmic axis of wavelengths. */
function bars(i) {
  const waves = DATA.waves[i], values = shares().planes[i].map(row => row.map(v => v / 1e4)), turned = waves.filter(w => w !== null);
  const last = turned.length ? Math.max(...turned) : 1, centre = waves.map(w => Math.log10(w ?? 4 * last));
  const gaps = [...centre].sort((a, b) => a - b).map((c, m, all) => m ? c - all[m - 1] : 0).filter(g => g > 1e-6);
  const width = gaps.length ? 0.7 * Math.min(...gaps) : 0.5;
  const ends = [Math.min(...centre) - width, Math.max(...centre) + width];
  const x = u => LEFT + 4 + (u - ends[0]) / (ends[1] - ends[0]) * (RIGHT - LEFT - 8);
  const up = values.map(v => v.reduce((s, w) => s + Math.max(0, w), 0)), down = values.map(v => v.reduce((s, w) => s + Math.min(0, w), 0));
  const [svg, y] = board2('share of each plane by its wavelength', Math.min(0, ...down), Math.max(0, ...up) || 1);
  DATA.marks.forEach((w, m) => { const u = Math.log10(w); if (u > ends[0] && u < ends[1]) upright(svg, x(u), `${w} tokens`, m ? 'start' : 'end'); });
  values.forEach((stack, m) => {
    let top = 0, bottom = 0;
    stack.forEach((v, g) => {
      const from = v >= 0 ? top : bottom, to = from + v;
      if (v >= 0) top = to; else bottom = to;
      const bar = add(svg, 'rect', {x: x(centre[m] - width / 2), width: x(width) - x(0), y: y(Math.max(from, to)), height: Math.abs(y(from) - y(to)), fill: DATA.groups[g][1], 'data-value': v, 'data-wave': waves[m] ?? '', 'data-group': DATA.groups[g][0]});
      if (waves[m] === null) { bar.setAttribute('stroke', 'var(--ink)'); bar.setAttribute('stroke-dasharray', '3 2'); }
      offer(bar, () => `planes.${state.share}[${i}, ${m}, [${DATA.terms[g].join(', ')}]].sum()`);
      add(bar, 'title', {}, `${waves[m] === null ? 'not rotated' : `wavelength ${number(waves[m])} tokens`}: ${DATA.groups[g][0]} ${number(v)}`);
    });
  });
  const free = turned.length < waves.length ? x(Math.log10(4 * last)) - 74 : RIGHT;  // of the name of what is not rotated
  for (let t = Math.ceil(ends[0]); t <= ends[1]; t++) if (turned.length && x(t) < free) add(svg, 'text', {x: x(t), y: LOW + 13, 'text-anchor': 'middle'}, t < 4 ? 10 ** t : `${10 ** (t - 3)}k`);
  if (turned.length < waves.length) add(svg, 'text', {x: x(Math.log10(4 * last)), y: LOW + 13, 'text-anchor': turned.length ? 'end' : 'middle'}, 'not rotated');
  add(svg, 'text', {x: (LEFT + RIGHT) / 2, y: LOW + 26, 'text-anchor': 'middle'}, 'wavelength of the plane (tokens)');
}
/* The mean score at each offset, with its interval. */
function curve(i) {
  const [mean, low, high] = DATA.profile.heads[i], offsets = DATA.profile.offsets;
  const known = [...mean, ...low, ...high].filter(v => v !== null);
  const [svg, y] = board2('mean score at each offset', Math.min(0, ...known), Math.max(0, ...known));
  const x = o => LEFT + 8 + (o - offsets[0]) / (offsets.at(-1) - offsets[0] || 1) * (RIGHT - LEFT - 16);
  if (offsets.includes(1)) upright(svg, x(1), 'the token before');
  const points = values => values.map((v, k) => v === null ? null : `${x(offsets[k])},${y(v)}`).filter(p => p);
  if (low.every(v => v !== null)) add(svg, 'polygon', {points: [...points(high), ...points(low).reverse()].join(' '), class: 'between'});
  add(svg, 'polyline', {points: points(mean).join(' '), class: 'curve'});
  mean.forEach((v, k) => {
    if (v === null) return;
    const dot = add(svg, 'circle', {cx: x(offsets[k]), cy: y(v), r: 2.2, class: 'dot', 'data-offset': offsets[k], 'data-value': v});
    offer(dot, () => `profile.mean[${DATA.profile.rows[i]}, ${offsets[k] - DATA.profile.first}]`);
    add(dot, 'title', {}, `offset ${offsets[k]}: ${number(v)}`);
  });
  for (let o = 0; o <= offsets.at(-1); o += 8) if (o >= offsets[0]) add(svg, 'text', {x: x(o), y: LOW + 13, 'text-anchor': 'middle'}, o);
  add(svg, 'text', {x: (LEFT + RIGHT) / 2, y: LOW + 26, 'text-anchor': 'middle'}, 'offset, query minus key (tokens)');
}
function show(i) {
  if (cells[state.head]) { cells[state.head].setAttribute('aria-pressed', false); cells[state.head].tabIndex = -1; }
  state.head = i; cells[i].setAttribute('aria-pressed', true); cells[i].tabIndex = 0;
  side.replaceChildren();
  make('h2', name(i), null, side);
  const line = make('div', null, {class: 'row'}, side);
  DATA.bands.forEach(([band, , colour], b) => {
    const v = shares().bands[i][b];
    if (!v && band === 'pass') return;
    const key = make('span', null, {class: 'key'}, line);
    make('i', null, {style: `background:${colour}`}, key); make('span', `${band} `, null, key);
    make('b', number(v, 2), {'data-band': band, 'data-value': v ?? ''}, key);
    offer(key, () => bandCode(i, b));
  });
  state.code = codeLine(side); state.kept = bandCode(i, best(i)); state.code.show(state.kept);
  const said = make('p', `Share of ${choose.selectedOptions[0].textContent} of each plane: `, {class: 'said'}, side);
  DATA.groups.forEach(([group, colour]) => { const key = make('span', null, {class: 'key'}, said); make('i', null, {style: `background:${colour}`}, key); make('span', group, null, key); });
  bars(i);
  if (!DATA.profile) return;
  const has = i in DATA.profile.heads;
  make('p', has ? `Score at each offset: ${DATA.profile.said}` : `No offset profile of this head; it was taken of ${Object.keys(DATA.profile.heads).map(name).join(', ')}.`, {class: 'said'}, side);
  if (has) curve(i);
}
choose.onchange = () => { state.share = choose.value; colour(); show(state.head); };
colour(); show(state.head);
document.body.dataset.drawn = performance.now();

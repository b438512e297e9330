const LEFT = 52, TOP = 4, rows = DATA.layers.length, c = DATA.cell, H = 22;
const grid = new Map(DATA.heads.map(([row, head], i) => [row * DATA.count + head, i]));
const state = {value: DATA.value, head: 0, over: null};
const number = v => v === null ? 'NaN' : (v && Math.abs(v) < 1e-4 ? v.toExponential(1) : String(+v.toPrecision(Math.abs(v) < 1000 ? 3 : 6))).replaceAll('-', '−');
/* The same in the width of a cell: what is nothing on the scale of the others is 0. */
const brief = v => { const text = number(+v.toPrecision(2)); return text.length <= 6 ? text : Math.abs(v) < 0.001 ? '0' : v.toExponential(0).replaceAll('-', '−'); };
const name = i => `L${DATA.layers[DATA.heads[i][0]]}H${DATA.heads[i][1]}`;

make('h1', DATA.title);
const tools = make('div', null, {class: 'row'}), label = make('label', 'value ', null, tools);
const choose = make('select', null, {'aria-label': 'value'}, label);
for (const column of Object.keys(DATA.columns)) make('option', DATA.said[column], {value: column}, choose);
choose.value = state.value;
const [, barPen] = board(300, 30, tools);
const [sheet, pen] = board(...DATA.canvas, make('div', null, {class: 'scroll'}));
const where = make('div', null, {class: 'where'}), code = codeLine(), box = make('div', null, {class: 'read'});
const readings = {};
const names = [...Object.keys(DATA.words), ...Object.keys(DATA.columns)];
names.sort((a, b) => /-/.test(a) - /-/.test(b));  // single terms last
const more = make('details', null), rest = make('div', null, {class: 'read'}, more);
more.prepend(Object.assign(document.createElement('summary'), {textContent: `${names.length - DATA.read} more numbers`}));
if (names.length <= DATA.read) more.remove();
names.forEach((column, i) => {
  readings[column] = make('b', '', {'data-column': column}, make('div', DATA.said[column], {title: column}, i < DATA.read ? box : rest));
});
make('p', DATA.caption);

function draw() {
  const {values, scale: [low, high]} = DATA.columns[state.value], holes = hatch(pen);
  pen.clearRect(0, 0, ...DATA.canvas); barPen.clearRect(0, 0, 300, 30);
  bar(barPen, 24, 2, 200, high, low < 0, '', low);
  if (values.some(v => Math.abs(v) > high)) for (const [end, x] of [['under', 8], ['over', 228]]) { barPen.fillStyle = rgb(BEYOND[end]); barPen.fillRect(x, 2, 12, 10); }
  pen.textBaseline = 'middle';
  for (let row = 0; row < rows; row++) for (let head = 0; head < DATA.count; head++) {
    const i = grid.get(row * DATA.count + head), x = LEFT + head * c, y = TOP + row * H, v = i === undefined ? undefined : values[i];
    const colour = v == null ? null : shade(v, high, low < 0, low);
    pen.fillStyle = v === undefined ? css('--out') : v === null ? holes : rgb(colour);
    pen.fillRect(x, y, c - 1, H - 1);
    if (colour && c >= 34) { pen.fillStyle = ink(colour); pen.font = '10px system-ui'; pen.textAlign = 'center'; pen.fillText(brief(v), x + c / 2, y + H / 2); }
    if (i === state.head || i !== undefined && i === state.over) {
      pen.strokeStyle = css('--mark'); pen.lineWidth = i === state.head ? 2 : 1; pen.strokeRect(x - 0.5, y - 0.5, c, H);
    }
  }
  pen.fillStyle = css('--soft'); pen.font = '10px system-ui';
  pen.textAlign = 'right'; DATA.layers.forEach((layer, row) => pen.fillText(`layer ${layer}`, LEFT - 6, TOP + (row + 0.5) * H));
  pen.textAlign = 'center';
  const every = Math.ceil(18 / c);
  for (let head = 0; head < DATA.count; head += every) pen.fillText(head, LEFT + (head + 0.5) * c, TOP + rows * H + 9);
  pen.fillText('head', LEFT + DATA.count * c / 2, TOP + rows * H + 24);
}
function show(i) {
  where.textContent = `${name(i)} (click a head to keep its numbers here)`;
  code.show(`table.to_dataframe().iloc[${i}, ${DATA.columns[state.value].at}]`);
  for (const [column, node] of Object.entries(readings)) {
    const v = column in DATA.words ? DATA.words[column][i] : DATA.columns[column].values[i];
    node.textContent = column in DATA.words ? v : number(v); node.dataset.value = v ?? '';
  }
}
function headAt(event) {
  const r = sheet.getBoundingClientRect();
  const head = Math.floor((event.clientX - r.left - LEFT) / c), row = Math.floor((event.clientY - r.top - TOP) / H);
  return head >= 0 && head < DATA.count && row >= 0 && row < rows ? grid.get(row * DATA.count + head) ?? null : null;
}
const over = i => { if (i !== state.over) { state.over = i; show(i ?? state.head); draw(); } };
sheet.onpointermove = event => { const i = headAt(event); sheet.style.cursor = i === null ? '' : 'pointer'; over(i); };
sheet.onpointerleave = () => over(null);
sheet.onclick = event => { const i = headAt(event); if (i !== null) { state.head = i; show(i); draw(); } };
choose.onchange = () => { state.value = choose.value; show(state.head); draw(); };
dark.addEventListener('change', draw);
show(0); draw();
document.body.dataset.drawn = performance.now();

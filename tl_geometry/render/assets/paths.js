const W = 760, HEIGHT = 440, states = DATA.states.length;
const view = {a: 0.6, b: 0.4, zoom: 1, last: states, down: null, at: null};

make('h1', DATA.title);
const [sheet, pen] = board(W, HEIGHT);
sheet.style.touchAction = 'none';
const tools = make('div', null, {class: 'row'}), label = make('label', 'to state ', null, tools);
const slider = make('input', null, {type: 'range', min: 1, max: states, value: states, 'aria-label': 'last state'}, label);
const said = make('output', '', null, tools);
const where = make('div', null, {class: 'where'});
make('p', DATA.caption + '; drag to turn, scroll to zoom');

/* Place on the sheet of a point with coordinates in -1..1. */
function put([x, y, z]) {
  const X = x * Math.cos(view.a) - y * Math.sin(view.a), Y = x * Math.sin(view.a) + y * Math.cos(view.a), s = 0.42 * view.zoom * HEIGHT;
  return [W / 2 + X * s, HEIGHT / 2 - (z * Math.cos(view.b) - Y * Math.sin(view.b)) * s];
}
function hue(t) {
  const [r, g, b] = mix(PLAIN, 0.9 * t / Math.max(1, states - 1)), lift = dark.matches ? 40 : 0;
  return `rgb(${r + lift},${g + lift},${b + lift})`;
}
function draw() {
  pen.clearRect(0, 0, W, HEIGHT);
  said.textContent = DATA.states[view.last - 1];
  pen.font = '11px system-ui'; pen.textBaseline = 'middle'; pen.textAlign = 'left';
  [[1, 0, 0], [0, 1, 0], [0, 0, 1]].forEach((end, i) => {
    const [u, v] = [put([0, 0, 0]), put(end)];
    pen.strokeStyle = css('--line'); pen.beginPath(); pen.moveTo(...u); pen.lineTo(...v); pen.stroke();
    pen.fillStyle = css('--soft'); pen.fillText(DATA.names[i], ...v);
  });
  DATA.paths.forEach((path, p) => {
    const strong = view.at && view.at[0] === p;
    pen.lineWidth = strong ? 2 : 1; pen.globalAlpha = strong ? 1 : 0.55;
    for (let t = 1; t < view.last; t++) {
      pen.strokeStyle = hue(t); pen.beginPath(); pen.moveTo(...put(path[t - 1])); pen.lineTo(...put(path[t])); pen.stroke();
    }
    pen.globalAlpha = 1; pen.fillStyle = hue(view.last - 1);
    const [x, y] = put(path[view.last - 1]);
    pen.fillRect(x - 1.5, y - 1.5, 3, 3);
    if (DATA.marked) { pen.fillStyle = css('--ink'); pen.fillText(DATA.labels[p], x + 5, y); }
  });
  if (view.at) { const [x, y] = put(DATA.paths[view.at[0]][view.at[1]]); pen.strokeStyle = css('--mark'); pen.strokeRect(x - 4, y - 4, 8, 8); }
}
function nearest(x, y) {
  let best = null, least = 144;
  DATA.paths.forEach((path, p) => path.slice(0, view.last).forEach((point, t) => {
    const [u, v] = put(point), d = (u - x) ** 2 + (v - y) ** 2;
    if (d < least) { least = d; best = [p, t]; }
  }));
  return best;
}
sheet.onpointerdown = e => { view.down = [e.clientX, e.clientY, view.a, view.b]; sheet.setPointerCapture(e.pointerId); };
sheet.onpointermove = e => {
  if (view.down) { view.a = view.down[2] + (e.clientX - view.down[0]) / 150; view.b = view.down[3] + (e.clientY - view.down[1]) / 150; }
  else {
    const r = sheet.getBoundingClientRect(); view.at = nearest(e.clientX - r.left, e.clientY - r.top);
    where.textContent = view.at ? `${DATA.labels[view.at[0]]}, state ${DATA.states[view.at[1]]}` : '';
  }
  draw();
};
sheet.onpointerup = () => { view.down = null; };
sheet.onwheel = e => { e.preventDefault(); view.zoom *= Math.exp(-e.deltaY / 600); draw(); };
slider.oninput = () => { view.last = +slider.value; draw(); };
dark.onchange = draw;
draw();
document.body.dataset.drawn = performance.now();

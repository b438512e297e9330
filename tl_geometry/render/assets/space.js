make('h1', DATA.title);
const gd = make('div', null, {id: 'space'}, make('div', null, {class: 'scroll'}));
gd.style.cssText = 'width:760px;height:470px';
make('p', DATA.caption + ' Drag to turn, scroll to zoom.');

/* Colours of the page, in light and in dark. */
function dress() {
  const axis = {gridcolor: css('--line'), zerolinecolor: css('--soft'), linecolor: css('--line'), showbackground: false};
  const scene = Object.fromEntries(['xaxis', 'yaxis', 'zaxis'].flatMap(a => Object.entries(axis).map(([k, v]) => [`scene.${a}.${k}`, v])));
  return {paper_bgcolor: css('--paper'), 'font.color': css('--ink'), ...scene};
}
(async () => {
  const code = document.createElement('script');
  code.textContent = new TextDecoder().decode(await inflate(DATA.library));
  document.head.append(code);
  await Plotly.newPlot(gd, DATA.figure.data, DATA.figure.layout, DATA.figure.config);
  const redress = () => Plotly.relayout(gd, dress());
  dark.addEventListener('change', redress);
  await redress();
  document.body.dataset.drawn = performance.now();
})().catch(error => { gd.textContent = 'This figure could not be drawn: ' + error; });

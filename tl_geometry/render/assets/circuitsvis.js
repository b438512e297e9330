make('h1', DATA.title);
const figure = make('div', 'drawing ...', {id: 'figure'}), ends = make('p'), high = DATA.limit.toPrecision(3);
const colours = [...(DATA.signed ? [DATA.props.negativeColor] : []), '#fff', DATA.props.positiveColor];
make('span', DATA.signed ? '-' + high : '0', {id: 'low'}, ends);
make('span', null, {class: 'bar', style: `background:linear-gradient(90deg,${colours.join()})`}, ends);
make('span', high, {id: 'high'}, ends);
make('p', DATA.caption, {id: 'caption'});
(async () => {
  const code = document.createElement('script');
  code.textContent = new TextDecoder().decode(await inflate(DATA.library));
  document.head.append(code);
  figure.textContent = '';
  CircuitsVis.render('figure', CircuitsVis.AttentionHeads, DATA.props);
  document.body.dataset.drawn = '1';
})().catch(error => { figure.textContent = 'This figure could not be drawn: ' + error; });

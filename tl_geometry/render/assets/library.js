/* Another library draws into the page; its script lies deflated beside the data, and runs by its hash. */
async function load(parent) {
  const figure = make(parent, 'div', null, {id: 'figure'}), code = document.createElement('script');
  code.textContent = await inflate(PAGE.library).text();
  document.head.append(code);
  return figure;
}
/* circuitsvis mixes the colour of the sign with white, on either ground. */
STOPS.mixed = [[33, 102, 172], [144, 179, 214], [255, 255, 255], [217, 140, 149], [178, 24, 43]];
PARTS.circuitsvis = async (part, parent) => {
  await load(parent);
  CircuitsVis.render('figure', CircuitsVis[part.component], part.props);
  scale(make(parent, 'div', null, {class: 'tools'}), 'mixed')(part.limit, part.signed);
};
PARTS.plotly = async (part, parent) => {
  const figure = await load(parent);
  await Plotly.newPlot(figure, part.figure.data, part.figure.layout, {...part.figure.config, responsive: true});
};

/* Rows of long tables by what is written in them. */
addEventListener('input', event => {
  const table = event.target.closest('.table');
  if (!table) return;
  const wanted = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
  let left = 0;
  for (const row of table.querySelectorAll('tbody tr')) {
    const text = row.textContent.toLowerCase();
    row.hidden = !wanted.every(word => text.includes(word));
    left += !row.hidden;
  }
  table.querySelector('output').textContent = wanted.length ? `${left} rows` : '';
});

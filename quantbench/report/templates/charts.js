// Draws a report's charts with uPlot: pointing at a size tells its shape, time, kernel and grade; names below a chart
// toggle lines; dragging zooms.
'use strict';
for (const figure of document.querySelectorAll('[data-chart]')) {
  const {axis, unit, lines, marks, colours} = JSON.parse(figure.dataset.chart);
  const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const make = (tag, name, text = '') => Object.assign(document.createElement(tag), {className: name, textContent: text});
  const xs = [...new Set(lines.flatMap(line => line.dots.map(dot => dot.x)))].sort((a, b) => a - b);
  const at = lines.map(line => new Map(line.dots.map(dot => [dot.x, dot])));
  const column = (known, name) => xs.map(x => known.has(x) ? known.get(x)[name] : null);
  const data = [xs, ...at.flatMap(known => [column(known, 'y'), column(known, 'low'), column(known, 'high')])];
  const holder = make('div', 'plot'), said = make('p', 'note said', 'Point at a place for what was measured there.');
  figure.append(holder, said);
  const series = [{label: axis}], bands = [];
  lines.forEach((line, i) => {
    const value = (u, v) => v === null || v === undefined ? '–' : v.toFixed(1), clear = {stroke: 'transparent', spanGaps: true, points: {show: false}};
    series.push({label: line.name, stroke: colours[i % colours.length], width: 1.6, dash: [[], [8, 4], [2, 3]][i % 3], spanGaps: true, value, points: {show: true, size: 5}},
      {...clear, label: 'low'}, {...clear, label: 'high'});
    bands.push({series: [3 * i + 3, 3 * i + 2], fill: `${colours[i % colours.length]}30`});
  });
  const style = {stroke: css('--ink'), grid: {stroke: css('--line')}, ticks: {stroke: css('--line')}};
  const plot = new uPlot({
    width: holder.clientWidth, height: 320, series, bands, scales: {x: {time: false, distr: xs[0] > 0 && xs[xs.length - 1] > 24 * xs[0] ? 3 : 1}},
    axes: [{...style, label: axis, values: (u, v) => v.map(x => x === null ? '' : String(x))}, {...style, label: unit, size: 60}],
    cursor: {drag: {x: true, y: false}},
    hooks: {
      setCursor: [u => {
        if (u.cursor.idx === null || u.cursor.idx === undefined) return;
        const found = at.map((known, i) => u.series[3 * i + 1].show && known.get(xs[u.cursor.idx])).filter(Boolean);
        said.textContent = found.map(dot => dot.words).join(' · ');
      }],
      draw: [u => marks.forEach(({x, y, label}) => {
        const c = u.ctx, r = devicePixelRatio, px = u.valToPos(x, 'x', true), py = u.valToPos(y, 'y', true);
        if (px < u.bbox.left || px > u.bbox.left + u.bbox.width) return;
        c.save(); c.fillStyle = css('--cliff'); c.beginPath(); c.arc(px, py, 4 * r, 0, 7); c.fill();
        c.font = `bold ${12 * r}px system-ui`; c.textAlign = 'center'; c.fillText(label, px, py + 18 * r); c.restore();
      })],
    },
  }, data, holder);
  plot.root.querySelectorAll('.u-series').forEach((row, i) => {
    if (i && (i - 1) % 3) { row.hidden = true; return; }
    const head = row.querySelector('th');
    if (i) Object.assign(head, {tabIndex: 0, onkeydown: event => { if (event.key === 'Enter') head.click(); }});
    if (i) head.addEventListener('click', () => setTimeout(() => [1, 2].forEach(j => plot.setSeries(i + j, {show: plot.series[i].show}))));
  });
  new ResizeObserver(() => plot.setSize({width: holder.clientWidth, height: 320})).observe(holder);
}

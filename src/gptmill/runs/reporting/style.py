"""The style sheet of the page: light and dark, wide and narrow, screen and paper."""

from __future__ import annotations

# Okabe and Ito's colours, which remain distinct for colour-blind readers; lighter ones on a dark page.
LIGHT = ("#0063a6", "#c2410c", "#00795a", "#a33b83", "#7a6200", "#4b5563")
DARK = ("#6fb7ee", "#ff9a5c", "#4fc9a4", "#e39ac7", "#d9c04f", "#aab2bf")
DASHES = ("none", "7 3", "2 3", "9 3 2 3", "12 4", "5 2 1 2 1 2")
STYLES = len(LIGHT)


def make_style_sheet() -> str:
    light = "".join(f"--c{number}:{colour};" for number, colour in enumerate(LIGHT))
    dark = "".join(f"--c{number}:{colour};" for number, colour in enumerate(DARK))
    strokes = "".join(
        f".line.s{number}{{stroke:var(--c{number});stroke-dasharray:{DASHES[number]}}}"
        f".band.s{number}{{stroke:var(--c{number})}}"
        f".dot.s{number}{{fill:var(--c{number})}}"
        f".label.s{number}{{fill:var(--c{number})}}\n"
        for number in range(STYLES)
    )
    return BASE.replace("/*light*/", light).replace("/*dark*/", dark) + strokes


BASE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1d21;--soft:#5b626d;--rule:#dfe2e7;--tint:#f5f6f8;/*light*/}
@media (prefers-color-scheme:dark){:root{--paper:#15171b;--ink:#e4e6ea;--soft:#9aa2ad;--rule:#2f343c;--tint:#1d2026;
/*dark*/}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.55 "Source Sans 3","Source Sans Pro",system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,
sans-serif;font-variant-numeric:tabular-nums}
main{max-width:48rem;margin:0 auto;padding:3rem 1rem 4rem}
header p.kind{margin:0;color:var(--soft);font-size:.85rem;letter-spacing:.04em}
h1{font-size:1.9rem;line-height:1.2;margin:.15rem 0 .2rem;font-weight:650;overflow-wrap:anywhere}
p.subtitle{margin:0 0 1.2rem;color:var(--soft)}
h2{font-size:1.15rem;margin:2.6rem 0 .7rem;padding-top:.7rem;border-top:1px solid var(--rule);font-weight:650}
p{margin:.6rem 0;max-width:42rem;overflow-wrap:anywhere}
.figures{display:grid;grid-template-columns:repeat(3,1fr);gap:1.1rem 1.2rem;margin:1.6rem 0}
.figures div{border-top:2px solid var(--ink);padding-top:.35rem}
.figures b{display:block;font-size:1.35rem;line-height:1.3;font-weight:600}
.figures span{display:block;font-size:.85rem}
.figures small{display:block;color:var(--soft);font-size:.8rem;line-height:1.35}
.scroll{overflow-x:auto;margin:.8rem 0}
table{border-collapse:collapse;font-size:.875rem;min-width:60%}
th{font-weight:600;color:var(--soft);text-align:right;vertical-align:bottom;border-bottom:1px solid var(--ink)}
td{text-align:right;border-bottom:1px solid var(--rule)}
th,td{padding:.28rem 0 .28rem 1.15rem;white-space:nowrap}
th:first-child,td:first-child{padding-left:0}
th.words,td.words{text-align:left}
td.long{white-space:normal;overflow-wrap:anywhere;min-width:14rem}
tr.strong td{font-weight:650}
figure{margin:1rem 0;break-inside:avoid}
figcaption{font-size:.85rem;color:var(--soft);margin:0 0 .2rem}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:.4rem 1.2rem}
.pair figure{margin:.5rem 0;min-width:0}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{font-size:12px;fill:var(--soft);font-variant-numeric:tabular-nums}
svg .end{text-anchor:end}svg .mid{text-anchor:middle}
svg .label{font-weight:600}
.grid{stroke:var(--rule);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
.mark{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 3}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}
.band{fill:none;stroke-width:1;opacity:.28;stroke-linejoin:round}
.dot{stroke:var(--paper);stroke-width:.8}
.narrow{display:none}
ul.legend{list-style:none;margin:.8rem 0;padding:0;font-size:.9rem}
ul.legend svg{display:inline-block;width:3rem;height:.8rem;vertical-align:middle;margin-right:.6rem}
.quote{margin:1rem 0;break-inside:avoid}
.quote h3{font-size:.85rem;color:var(--soft);font-weight:400;margin:0 0 .3rem}
.quote pre{margin:0;padding:.7rem .9rem;background:var(--tint);border-left:3px solid var(--rule);white-space:pre-wrap;
overflow-wrap:anywhere;overflow:hidden;max-height:24rem;unicode-bidi:plaintext;
font:.82rem/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
.quote pre i{font-style:normal;color:var(--soft)}
details{margin:.8rem 0}summary{cursor:pointer;color:var(--soft);font-size:.9rem}
footer{margin-top:3rem;padding-top:.7rem;border-top:1px solid var(--rule);color:var(--soft);font-size:.8rem}
@media (max-width:40rem){main{padding:1.5rem 1rem 3rem}h1{font-size:1.5rem}.wide{display:none}.narrow{display:block}
.pair{grid-template-columns:1fr}.figures{grid-template-columns:1fr 1fr}th,td{padding-left:1rem}}
@media print{:root{color-scheme:light;--paper:#fff;--ink:#000;--soft:#444;--rule:#ccc;--tint:#f6f6f6;/*light*/}
main{max-width:none;padding:0}body{font-size:10.5pt}h2{break-after:avoid}.quote pre{max-height:none}
tr{break-inside:avoid}
.scroll{overflow:visible}td.long{min-width:0}}
"""

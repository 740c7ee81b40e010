"""Documents: words, tables and charts as values, and their output formats.

Document ─ Section ─┬─ words, Table
                    ├─ Chart ── chart_svg ──► a picture, which is also in the HTML for readers without scripts
                    └─ Film ──► the block map through time
  └── document_html ──► one file of HTML: no request to anywhere, interactive where scripts run
"""

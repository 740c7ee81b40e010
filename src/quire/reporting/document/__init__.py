"""Documents: text, tables and charts as values, and their output formats.

Document ─ Section ─┬─ text, Table
                    ├─ Chart ── chart_svg ──► a picture, which is also in the HTML for readers without scripts
                    └─ Film ──► the block map over time
  └── document_html ──► one HTML file that loads nothing, interactive if scripts run
"""

"""Pages: words, tables and charts as values, and what is made of them.

Page ─ Section ─┬─ words, Table
                ├─ Chart ── chart_svg ──► a picture, which is also in the page for who runs no script
                └─ Film ──► the block map through time
  └── page_html ──► one file of HTML: no request to anywhere, interactive where scripts run
"""

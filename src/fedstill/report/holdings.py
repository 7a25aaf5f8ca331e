"""Figures of a partition: the records of each class at each client; None without such numbers."""

from typing import Any

import numpy as np

from fedstill.report import figures
from fedstill.report.record import RunRecord

BLANK = "Blank: no records."
AREA = "The area of a bubble is the number of records."
"""What a reader of `records_per_client` and of `bubbles` has to know."""


def records_per_client(record: RunRecord) -> Any | None:
    """Records of each class at each client as a heat map; blank for none.

    More than `figures.MANY_CLIENTS` clients are ordered by their largest class.
    """
    if record.counts is None or not record.counts.size:
        return None
    counts = record.counts
    num_clients, num_classes = counts.shape
    order = np.arange(num_clients)
    few = num_clients <= figures.MANY_CLIENTS
    if not few:
        order = np.lexsort((-counts.max(axis=1), counts.argmax(axis=1)))
    shown = counts[order].T
    figure = figures.axes("client" if few else "clients, ordered by their largest class", "class")
    figure.add_heatmap(
        z=np.where(shown > 0, shown.astype(np.float64), np.nan),
        customdata=np.broadcast_to(order, shown.shape),
        text=np.broadcast_to([[figures.class_text(record, c)] for c in range(num_classes)], shown.shape),
        hovertemplate="client %{customdata}<br>class %{text}<br>%{z:d} records<extra></extra>",
        hoverongaps=False,
        **figures.heat_scale(num_clients, float(counts.max())),
    )
    figure.update_xaxes(showgrid=False, showticklabels=few, tickformat="d")
    if num_clients <= 12:
        figure.update_xaxes(dtick=1)
    figures.class_axis(figure.update_yaxes, record, num_classes)
    figure.update_yaxes(autorange="reversed")
    figure.update_layout(height=figures.plot_height(24 * num_classes + 140))
    return figure


def bubbles(record: RunRecord) -> Any | None:
    """Clients by classes, as papers draw a partition: the area of a bubble is the number of records.

    None for more than `figures.MANY_CLIENTS` clients.
    """
    if record.counts is None or not record.counts.any() or len(record.counts) > figures.MANY_CLIENTS:
        return None
    num_clients, num_classes = record.counts.shape
    client, label = np.nonzero(record.counts)
    count = record.counts[client, label]
    figure = figures.axes("client", "class")
    widest = min(26.0, 620.0 / num_clients, 480.0 / num_classes)  # pixels from one bubble to the next
    figure.add_scatter(
        x=client,
        y=label,
        mode="markers",
        marker={
            "color": figures.PALETTE[0],
            "opacity": 0.8,
            "size": count,
            "sizemode": "area",
            "sizeref": float(count.max()) / (widest**2 / 2),  # plotly doubles it
            "line": {"width": 0},
        },
        text=[figures.class_text(record, int(c)) for c in label],
        hovertemplate="client %{x}<br>class %{text}<br>%{marker.size:d} records<extra></extra>",
    )
    figure.update_xaxes(range=[-0.7, num_clients - 0.3], tickformat="d", dtick=1 if num_clients <= 12 else None)
    figures.class_axis(figure.update_yaxes, record, num_classes)
    figure.update_yaxes(range=[num_classes - 0.3, -0.7])
    figure.update_layout(height=figures.plot_height(24 * num_classes + 140))
    return figure

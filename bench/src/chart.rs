//! The charts: requests, request units and speed of an orchestration, as bars on a logarithmic scale.

use std::fmt::Write;

use crate::fixture::{ProviderKind, Setting};
use crate::measure::{name, Outcome};
use crate::table::{by_workload, number, WorkloadOutcomes};

const WIDTH: f64 = 880.0;
const GAP: f64 = 14.0;
const TOP: f64 = 66.0;
const ROW: f64 = 44.0;
const BAR: f64 = 14.0;
/// The width of the figure beside the longest bar.
const FIGURE: f64 = 46.0;

/// The title and the columns of a chart.
struct ChartLayout {
    title: &'static str,
    /// The width of the names of the rows.
    labels: f64,
    /// The title and the measure of each panel, from left to right.
    panels: [(&'static str, &'static str); 3],
}

const SINGLE: ChartLayout = ChartLayout {
    title: "duroxide-cosmos beside duroxide-cdb: requests, request units, latency",
    labels: 118.0,
    panels: [
        ("requests per orchestration", name::REQUESTS),
        ("RU per orchestration", name::UNITS),
        ("milliseconds, median", name::MEDIAN),
    ],
};

const FLEET: ChartLayout = ChartLayout {
    title: "WorkerProcess processes that share a container: requests, request units, rate",
    labels: 160.0,
    panels: [
        ("requests per Hello", name::REQUESTS),
        ("RU per Hello", name::UNITS),
        ("Hellos per second (more is better)", name::RATE),
    ],
};

/// Colours for light and dark backgrounds. The document that embeds the chart sets the background.
const STYLE: &str = "\
text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif;fill:#24292f}\
.title{font-size:14px;font-weight:600}.panel{font-weight:600}.soft{fill:#59636e;font-size:11px}\
.cosmos{fill:#0969da}.cdb{fill:#afb8c1}.grid{stroke:#d1d9e0;stroke-width:1}\
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#9198a1}.cosmos{fill:#4493f8}.cdb{fill:#656c76}\
.grid{stroke:#3d444d}}";

/// The position and the scale of a panel.
struct Panel {
    left: f64,
    width: f64,
    lowest: f64,
    highest: f64,
}

impl Panel {
    /// Creates a panel. Its scale begins at the power of ten below the smallest figure, so that every bar is visible.
    fn new(layout: &ChartLayout, index: usize, values: &[f64]) -> Self {
        let width = (WIDTH - layout.labels) / layout.panels.len() as f64 - GAP;
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(1.0, f64::max);
        Self {
            left: layout.labels + index as f64 * (width + GAP),
            width: width - FIGURE,
            lowest: if least.is_finite() { (least * 0.8).log10().floor() } else { 0.0 },
            highest: most.log10().max(0.1),
        }
    }

    fn length(&self, value: f64) -> f64 {
        let share = (value.max(1e-9).log10() - self.lowest) / (self.highest - self.lowest).max(0.1);
        (share * self.width).max(2.0)
    }
}

/// Draws the workloads whose orchestrations run one after the other.
pub fn draw(outcomes: &[Outcome], setting: Setting) -> String {
    let mut rows = by_workload(outcomes);
    rows.retain(|group| value(group.cosmos, name::REQUESTS).or(value(group.cdb, name::REQUESTS)).is_some());
    let setting = format!("{} ms per request, {} physical partition(s)", setting.latency_ms, setting.partitions);
    draw_layout(&SINGLE, &rows, &setting)
}

/// Draws the fleets of different sizes, with the number of partitions that their names give.
pub fn draw_fleet(outcomes: &[Outcome], latency_ms: u64) -> String {
    let mut rows = by_workload(outcomes);
    rows.retain(|group| group.workload.starts_with("Fleet of"));
    draw_layout(&FLEET, &rows, &format!("{latency_ms} ms per request"))
}

fn draw_layout(layout: &ChartLayout, rows: &[WorkloadOutcomes<'_>], setting: &str) -> String {
    let height = TOP + rows.len() as f64 * ROW + 12.0;
    let mut svg = String::new();
    line(&mut svg, format!(r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">"#));
    line(&mut svg, format!("<title>{}</title>", layout.title));
    line(&mut svg, format!("<style>{STYLE}</style>"));
    legend(&mut svg, setting);
    for index in 0..layout.panels.len() {
        draw_panel(&mut svg, layout, index, rows);
    }
    for (at, group) in rows.iter().enumerate() {
        let y = TOP + at as f64 * ROW + BAR + 5.0;
        line(&mut svg, format!(r#"<text x="0" y="{y}">{}</text>"#, group.workload));
    }
    line(&mut svg, "</svg>".to_owned());
    svg
}

fn legend(svg: &mut String, setting: &str) {
    let entries = [(ProviderKind::Cosmos, 0.0), (ProviderKind::Cdb, 140.0)];
    for (kind, x) in entries {
        let class = kind.as_str();
        line(svg, format!(r#"<rect class="{class}" x="{x}" y="6" width="12" height="12" rx="2"/>"#));
        line(svg, format!(r#"<text x="{}" y="16">{}</text>"#, x + 18.0, kind.package()));
    }
    let notes = [
        (16.0, format!("less is better; logarithmic scales; local account, {setting}")),
        (32.0, "RU: estimate from published prices, not measured on Azure".to_owned()),
    ];
    for (y, note) in notes {
        line(svg, format!(r#"<text class="soft" x="{WIDTH}" y="{y}" text-anchor="end">{note}</text>"#));
    }
}

fn draw_panel(svg: &mut String, layout: &ChartLayout, index: usize, rows: &[WorkloadOutcomes<'_>]) {
    let (title, measure) = layout.panels[index];
    let figures = |group: &WorkloadOutcomes<'_>| [value(group.cosmos, measure), value(group.cdb, measure)];
    let values: Vec<f64> = rows.iter().flat_map(figures).flatten().collect();
    let panel = Panel::new(layout, index, &values);
    let (x, bottom) = (panel.left, TOP + rows.len() as f64 * ROW);
    line(svg, format!(r#"<text class="panel" x="{x:.1}" y="{}">{title}</text>"#, TOP - 18.0));
    line(svg, format!(r#"<line class="grid" x1="{x:.1}" y1="{}" x2="{x:.1}" y2="{bottom}"/>"#, TOP - 8.0));
    for (at, group) in rows.iter().enumerate() {
        let y = TOP + at as f64 * ROW;
        draw_bar(svg, &panel, ProviderKind::Cosmos, group.cosmos, measure, y);
        draw_bar(svg, &panel, ProviderKind::Cdb, group.cdb, measure, y + BAR + 2.0);
    }
}

fn draw_bar(svg: &mut String, panel: &Panel, kind: ProviderKind, outcome: Option<&Outcome>, measure: &str, y: f64) {
    let (x, class, middle) = (panel.left, kind.as_str(), y + BAR - 3.0);
    let Some(value) = value(outcome, measure) else {
        if let Some(outcome) = outcome {
            let skipped = outcome.note.as_deref().is_some_and(|note| note.starts_with("not run"));
            let why = if skipped { "not run" } else { "not finished" };
            line(svg, format!(r#"<text class="soft" x="{:.1}" y="{middle:.1}">{why}</text>"#, x + 5.0));
        }
        return;
    };
    let width = panel.length(value);
    line(svg, format!(r#"<rect class="{class}" x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{BAR}" rx="2"/>"#));
    let end = x + width + 5.0;
    line(svg, format!(r#"<text class="soft" x="{end:.1}" y="{middle:.1}">{}</text>"#, number(value)));
}

fn value(outcome: Option<&Outcome>, measure: &str) -> Option<f64> {
    outcome.and_then(|outcome| outcome.get(measure))
}

fn line(svg: &mut String, text: String) {
    // Writing to a string can't fail.
    let _ = writeln!(svg, "{text}");
}

//! The charts: requests, request units and speed of an orchestration, as bars on a logarithmic scale.

use std::fmt::Write;

use crate::measure::{name, Outcome};
use crate::scene::{Setting, Which};
use crate::table::{number, pairs, Pair};

const WIDTH: f64 = 880.0;
const GAP: f64 = 14.0;
const TOP: f64 = 66.0;
const ROW: f64 = 44.0;
const BAR: f64 = 14.0;
/// What the figure beside the longest bar needs.
const FIGURE: f64 = 46.0;

/// What a chart shows.
struct Sheet {
    title: &'static str,
    /// What the rows' names need.
    labels: f64,
    /// Titles and figures, from left to right.
    panels: [(&'static str, &'static str); 3],
}

const SINGLE: Sheet = Sheet {
    title: "duroxide-cosmos beside duroxide-cdb: requests, request units, latency",
    labels: 118.0,
    panels: [
        ("requests an orchestration", name::REQUESTS),
        ("request units an orchestration", name::UNITS),
        ("milliseconds, median", name::MEDIAN),
    ],
};

const FLEET: Sheet = Sheet {
    title: "Worker processes that share a container: requests, request units, rate",
    labels: 160.0,
    panels: [
        ("requests a Hello", name::REQUESTS),
        ("request units a Hello", name::UNITS),
        ("Hellos a second (more is better)", name::RATE),
    ],
};

/// Colours for light and dark backgrounds; the background itself is the page's.
const STYLE: &str = "\
text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif;fill:#24292f}\
.title{font-size:14px;font-weight:600}.panel{font-weight:600}.soft{fill:#59636e;font-size:11px}\
.ours{fill:#0969da}.peer{fill:#afb8c1}.grid{stroke:#d1d9e0;stroke-width:1}\
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#9198a1}.ours{fill:#4493f8}.peer{fill:#656c76}\
.grid{stroke:#3d444d}}";

/// One panel's place and scale.
struct Panel {
    left: f64,
    width: f64,
    lowest: f64,
    highest: f64,
}

impl Panel {
    /// The scale begins at the power of ten below the least figure, so that every bar can be seen.
    fn new(sheet: &Sheet, index: usize, values: &[f64]) -> Self {
        let width = (WIDTH - sheet.labels) / sheet.panels.len() as f64 - GAP;
        let least = values.iter().copied().fold(f64::INFINITY, f64::min);
        let most = values.iter().copied().fold(1.0, f64::max);
        Self {
            left: sheet.labels + index as f64 * (width + GAP),
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

/// Draws the workloads that ran one orchestration after the other.
pub fn draw(outcomes: &[Outcome], setting: Setting) -> String {
    let mut rows = pairs(outcomes);
    rows.retain(|pair| value(pair.ours, name::REQUESTS).or(value(pair.peer, name::REQUESTS)).is_some());
    let setting = format!("{} ms a request, {} physical partition(s)", setting.latency_ms, setting.partitions);
    draw_sheet(&SINGLE, &rows, &setting)
}

/// Draws fleets of different sizes on as many partitions as their names say.
pub fn draw_fleet(outcomes: &[Outcome], latency_ms: u64) -> String {
    let mut rows = pairs(outcomes);
    rows.retain(|pair| pair.workload.starts_with("Fleet of"));
    draw_sheet(&FLEET, &rows, &format!("{latency_ms} ms a request"))
}

fn draw_sheet(sheet: &Sheet, rows: &[Pair<'_>], setting: &str) -> String {
    let height = TOP + rows.len() as f64 * ROW + 12.0;
    let mut svg = String::new();
    line(&mut svg, format!(r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">"#));
    line(&mut svg, format!("<title>{}</title>", sheet.title));
    line(&mut svg, format!("<style>{STYLE}</style>"));
    legend(&mut svg, setting);
    for index in 0..sheet.panels.len() {
        draw_panel(&mut svg, sheet, index, rows);
    }
    for (at, pair) in rows.iter().enumerate() {
        let y = TOP + at as f64 * ROW + BAR + 5.0;
        line(&mut svg, format!(r#"<text x="0" y="{y}">{}</text>"#, pair.workload));
    }
    line(&mut svg, "</svg>".to_owned());
    svg
}

fn legend(svg: &mut String, setting: &str) {
    let entries = [(Which::Ours, 0.0), (Which::Peer, 140.0)];
    for (which, x) in entries {
        let class = which.as_str();
        line(svg, format!(r#"<rect class="{class}" x="{x}" y="6" width="12" height="12" rx="2"/>"#));
        line(svg, format!(r#"<text x="{}" y="16">{}</text>"#, x + 18.0, which.package()));
    }
    let text = format!("less is better; logarithmic scales; local account, {setting}");
    line(svg, format!(r#"<text class="soft" x="{WIDTH}" y="16" text-anchor="end">{text}</text>"#));
}

fn draw_panel(svg: &mut String, sheet: &Sheet, index: usize, rows: &[Pair<'_>]) {
    let (title, measure) = sheet.panels[index];
    let figures = |pair: &Pair<'_>| [value(pair.ours, measure), value(pair.peer, measure)];
    let values: Vec<f64> = rows.iter().flat_map(figures).flatten().collect();
    let panel = Panel::new(sheet, index, &values);
    let (x, bottom) = (panel.left, TOP + rows.len() as f64 * ROW);
    line(svg, format!(r#"<text class="panel" x="{x:.1}" y="{}">{title}</text>"#, TOP - 18.0));
    line(svg, format!(r#"<line class="grid" x1="{x:.1}" y1="{}" x2="{x:.1}" y2="{bottom}"/>"#, TOP - 8.0));
    for (at, pair) in rows.iter().enumerate() {
        let y = TOP + at as f64 * ROW;
        draw_bar(svg, &panel, Which::Ours, pair.ours, measure, y);
        draw_bar(svg, &panel, Which::Peer, pair.peer, measure, y + BAR + 2.0);
    }
}

fn draw_bar(svg: &mut String, panel: &Panel, which: Which, outcome: Option<&Outcome>, measure: &str, y: f64) {
    let (x, class, middle) = (panel.left, which.as_str(), y + BAR - 3.0);
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

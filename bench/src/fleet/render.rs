//! Renders one table per group, with a line for each row and provider and a column for each figure.

use super::{FleetRow, Group};
use crate::fixture::ProviderKind;
use crate::goals::{goal, Goal};
use crate::measure::{Better, Measure, Outcome};
use crate::table::number;

/// Renders the tables as text.
pub fn render(rows: &[FleetRow], outcomes: &[Outcome]) -> String {
    let mut text = String::new();
    for group in Group::ALL {
        let of_group = |outcome: &&Outcome| rows.iter().any(|row| row.group == group && row.name == outcome.workload);
        let outcomes: Vec<&Outcome> = outcomes.iter().filter(of_group).collect();
        if !outcomes.is_empty() {
            text.push_str(&format!("{}\n\n{}\n", group.title(), table(&outcomes)));
        }
    }
    text
}

fn table(outcomes: &[&Outcome]) -> String {
    let columns = columns(outcomes);
    let head = |measure: &&Measure| match measure.better {
        Better::Lower => format!("{} ↓", measure.name),
        Better::Higher => format!("{} ↑", measure.name),
        Better::Neither => measure.name.to_owned(),
    };
    let mut lines = vec![line(String::new(), String::new(), columns.iter().map(head))];
    let mut last = "";
    for outcome in outcomes.iter().filter(|outcome| !outcome.measures.is_empty()) {
        let name = if outcome.workload == last { "" } else { &outcome.workload };
        last = &outcome.workload;
        let cells = columns.iter().map(|column| cell(outcome, column.name));
        lines.push(line(name.to_owned(), outcome.provider.as_str().to_owned(), cells));
    }
    let bounds: Vec<String> = columns.iter().map(|column| bound(outcomes, column.name)).collect();
    if bounds.iter().any(|bound| !bound.is_empty()) {
        lines.push(line("goal".to_owned(), String::new(), bounds.into_iter()));
    }
    let mut text = align(&lines);
    for outcome in outcomes {
        if let Some(note) = &outcome.note {
            text.push_str(&format!("{}, {}: {note}\n", outcome.workload, outcome.provider.as_str()));
        }
    }
    text
}

/// Returns the figures of all rows, in the order of the row with the most figures.
fn columns<'a>(outcomes: &[&'a Outcome]) -> Vec<&'a Measure> {
    let mut by_count: Vec<&Outcome> = outcomes.to_vec();
    by_count.sort_by_key(|outcome| std::cmp::Reverse(outcome.measures.len()));
    let mut columns: Vec<&Measure> = Vec::new();
    for measure in by_count.iter().flat_map(|outcome| &outcome.measures) {
        if !columns.iter().any(|column| column.name == measure.name) {
            columns.push(measure);
        }
    }
    columns
}

fn line(name: String, provider: String, cells: impl Iterator<Item = String>) -> Vec<String> {
    [name, provider].into_iter().chain(cells).collect()
}

/// Formats a figure. For duroxide-cosmos a mark tells whether it meets its goal.
fn cell(outcome: &Outcome, measure: &str) -> String {
    let Some(value) = outcome.get(measure) else { return String::new() };
    let goal = goal(&outcome.workload, measure).filter(|_| outcome.provider == ProviderKind::Cosmos);
    match goal.map(|goal| goal.met(value)) {
        Some(true) => format!("{} ✓", number(value)),
        Some(false) => format!("{} ✗", number(value)),
        None => number(value),
    }
}

fn bound(outcomes: &[&Outcome], measure: &str) -> String {
    match outcomes.iter().find_map(|outcome| goal(&outcome.workload, measure)) {
        Some(Goal::AtMost(bound)) => format!("≤ {}", number(bound)),
        Some(Goal::AtLeast(bound)) => format!("≥ {}", number(bound)),
        None => String::new(),
    }
}

/// Aligns names to the left and figures to the right.
fn align(lines: &[Vec<String>]) -> String {
    let length = |text: &String| text.chars().count();
    let columns = lines.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| lines.iter().filter_map(|line| line.get(column)).map(length).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for line in lines {
        let cells = line.iter().zip(&widths).enumerate().map(|(column, (cell, width))| match column {
            0 | 1 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

//! The table.

use std::collections::BTreeMap;

use crate::goals::{goal, Goal};
use crate::measure::{Better, Outcome};
use crate::scene::Which;

const HEADER: [&str; 8] = ["workload", "measure", "ours", "plain", "peer", "peer ÷ ours", "goal", ""];

/// A workload's outcomes side by side.
pub struct Pair<'a> {
    /// The workload's name.
    pub workload: &'a str,
    /// This project's.
    pub ours: Option<&'a Outcome>,
    /// The same with nothing handed over.
    pub plain: Option<&'a Outcome>,
    /// The peer's.
    pub peer: Option<&'a Outcome>,
}

impl<'a> Pair<'a> {
    fn all(&self) -> [Option<&'a Outcome>; 3] {
        [self.ours, self.plain, self.peer]
    }
}

/// The outcomes by workload, in the order in which they were run.
pub fn pairs(outcomes: &[Outcome]) -> Vec<Pair<'_>> {
    let mut pairs: Vec<Pair<'_>> = Vec::new();
    for outcome in outcomes {
        let at = pairs.iter().position(|pair| pair.workload == outcome.workload).unwrap_or_else(|| {
            pairs.push(Pair { workload: &outcome.workload, ours: None, plain: None, peer: None });
            pairs.len() - 1
        });
        match outcome.provider {
            Which::Ours => pairs[at].ours = Some(outcome),
            Which::Plain => pairs[at].plain = Some(outcome),
            Which::Peer => pairs[at].peer = Some(outcome),
        }
    }
    pairs
}

/// The table as text.
pub fn render(outcomes: &[Outcome]) -> String {
    let mut rows = vec![HEADER.map(str::to_owned)];
    for pair in pairs(outcomes) {
        rows.extend(rows_of(&pair));
    }
    align(&rows)
}

fn rows_of(pair: &Pair<'_>) -> Vec<[String; 8]> {
    let mut rows: Vec<[String; 8]> = measures(pair).into_iter().map(|measure| row(pair, measure)).collect();
    let kinds = |outcome: Option<&Outcome>| outcome.map(|o| by_kind(&o.requests_by_kind)).unwrap_or_default();
    let kinds = pair.all().map(kinds);
    let lines = kinds.iter().map(Vec::len).max().unwrap_or(0);
    let cell = |of: usize, line: usize| kinds[of].get(line).cloned().unwrap_or_default();
    rows.extend((0..lines).map(|line| plain(["", "", &cell(0, line), &cell(1, line), &cell(2, line)])));
    for outcome in pair.all().into_iter().flatten() {
        if let Some(note) = &outcome.note {
            rows.push(plain(["", &format!("{}: {note}", outcome.provider.as_str()), "", "", ""]));
        }
    }
    if let Some(first) = rows.first_mut() {
        first[0] = pair.workload.to_owned();
    }
    rows
}

/// The figures that either has.
fn measures(pair: &Pair<'_>) -> Vec<(&'static str, Better)> {
    let mut names = Vec::new();
    for measure in pair.all().into_iter().flatten().flat_map(|outcome| &outcome.measures) {
        if !names.contains(&(measure.name, measure.better)) {
            names.push((measure.name, measure.better));
        }
    }
    names
}

fn row(pair: &Pair<'_>, (name, better): (&'static str, Better)) -> [String; 8] {
    let value = |outcome: Option<&Outcome>| outcome.and_then(|outcome| outcome.get(name));
    let [ours, plain, peer] = pair.all().map(value);
    let ratio = ours.zip(peer).filter(|(ours, _)| *ours > 0.0 && better != Better::Neither);
    let goal = goal(pair.workload, name);
    let arrow = match better {
        Better::Lower => " ↓",
        Better::Higher => " ↑",
        Better::Neither => "",
    };
    let met = goal.zip(ours).map(|(goal, ours)| if goal.met(ours) { "✓" } else { "✗" });
    [
        String::new(),
        format!("{name}{arrow}"),
        ours.map(number).unwrap_or_default(),
        plain.map(number).unwrap_or_default(),
        peer.map(number).unwrap_or_default(),
        ratio.map(|(ours, peer)| number(peer / ours)).unwrap_or_default(),
        goal.map(bound).unwrap_or_default(),
        met.unwrap_or_default().to_owned(),
    ]
}

fn bound(goal: Goal) -> String {
    match goal {
        Goal::AtMost(bound) => format!("≤ {}", number(bound)),
        Goal::AtLeast(bound) => format!("≥ {}", number(bound)),
    }
}

/// Requests by kind, the most frequent first, one a line.
fn by_kind(kinds: &BTreeMap<&'static str, f64>) -> Vec<String> {
    let mut kinds: Vec<_> = kinds.iter().collect();
    kinds.sort_by(|a, b| b.1.total_cmp(a.1));
    kinds.iter().map(|(kind, requests)| format!("{kind} {}", number(**requests))).collect()
}

fn plain(cells: [&str; 5]) -> [String; 8] {
    let [a, b, c, d, e] = cells.map(str::to_owned);
    [a, b, c, d, e, String::new(), String::new(), String::new()]
}

/// Three significant digits, more only for whole thousands.
pub fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => thousands(value.round() as i64),
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => trim(format!("{value:.1}")),
        _ => trim(format!("{value:.2}")),
    }
}

fn trim(text: String) -> String {
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn thousands(value: i64) -> String {
    let digits = value.abs().to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    if value < 0 {
        text.insert(0, '-');
    }
    text
}

/// Names to the left, figures to the right. A note runs over the columns that it leaves empty.
fn align(rows: &[[String; 8]]) -> String {
    let is_note = |row: &[String; 8]| row[2..].iter().all(String::is_empty);
    let length = |text: &String| text.chars().count();
    let width = |column: usize| rows.iter().filter(|row| !is_note(row)).map(|row| length(&row[column])).max();
    let mut widths: [usize; 8] = std::array::from_fn(|column| width(column).unwrap_or(0));
    // A workload of which there is only a note still has a name.
    widths[0] = rows.iter().map(|row| length(&row[0])).max().unwrap_or(0);
    let mut text = String::new();
    for (at, row) in rows.iter().enumerate() {
        if at > 0 && !row[0].is_empty() {
            text.push('\n');
        }
        let cell = |column: usize| match column {
            0 | 1 => format!("{:<1$}", row[column], widths[column]),
            _ => format!("{:>1$}", row[column], widths[column]),
        };
        let line: Vec<String> = (0..8).map(cell).collect();
        text.push_str(line.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        let cases = [(0.0, "0"), (0.25, "0.25"), (9.0, "9"), (47.64, "47.6"), (704.2, "704"), (15060.0, "15,060")];
        for (value, text) in cases {
            assert_eq!(number(value), text);
        }
    }
}

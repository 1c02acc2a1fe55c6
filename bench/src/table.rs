//! The table of the workloads of one process.

use std::collections::BTreeMap;

use crate::fixture::ProviderKind;
use crate::goals::{goal, Goal};
use crate::measure::{Better, Outcome};

const HEADER: [&str; 8] = ["workload", "measure", "cosmos", "no inline claims", "cdb", "cdb ÷ cosmos", "goal", ""];

/// The outcomes of one workload, by provider.
pub struct WorkloadOutcomes<'a> {
    /// The workload's name.
    pub workload: &'a str,
    /// duroxide-cosmos.
    pub cosmos: Option<&'a Outcome>,
    /// duroxide-cosmos without inline claims.
    pub no_inline_claims: Option<&'a Outcome>,
    /// duroxide-cdb.
    pub cdb: Option<&'a Outcome>,
}

impl<'a> WorkloadOutcomes<'a> {
    fn all(&self) -> [Option<&'a Outcome>; 3] {
        [self.cosmos, self.no_inline_claims, self.cdb]
    }
}

/// Groups the outcomes by workload, in the order in which they were measured.
pub fn by_workload(outcomes: &[Outcome]) -> Vec<WorkloadOutcomes<'_>> {
    let mut groups: Vec<WorkloadOutcomes<'_>> = Vec::new();
    for outcome in outcomes {
        let at = groups.iter().position(|group| group.workload == outcome.workload).unwrap_or_else(|| {
            groups.push(WorkloadOutcomes {
                workload: &outcome.workload,
                cosmos: None,
                no_inline_claims: None,
                cdb: None,
            });
            groups.len() - 1
        });
        match outcome.provider {
            ProviderKind::Cosmos => groups[at].cosmos = Some(outcome),
            ProviderKind::NoInlineClaims => groups[at].no_inline_claims = Some(outcome),
            ProviderKind::Cdb => groups[at].cdb = Some(outcome),
        }
    }
    groups
}

/// Renders the table as text.
pub fn render(outcomes: &[Outcome]) -> String {
    let mut rows = vec![HEADER.map(str::to_owned)];
    for group in by_workload(outcomes) {
        rows.extend(rows_of(&group));
    }
    align(&rows)
}

fn rows_of(group: &WorkloadOutcomes<'_>) -> Vec<[String; 8]> {
    let mut rows: Vec<[String; 8]> = measures(group).into_iter().map(|measure| row(group, measure)).collect();
    let kinds = |outcome: Option<&Outcome>| outcome.map(|o| by_kind(&o.requests_by_kind)).unwrap_or_default();
    let kinds = group.all().map(kinds);
    let lines = kinds.iter().map(Vec::len).max().unwrap_or(0);
    let cell = |of: usize, line: usize| kinds[of].get(line).cloned().unwrap_or_default();
    rows.extend((0..lines).map(|line| text_row(["", "", &cell(0, line), &cell(1, line), &cell(2, line)])));
    for outcome in group.all().into_iter().flatten() {
        if let Some(note) = &outcome.note {
            rows.push(text_row(["", &format!("{}: {note}", outcome.provider.as_str()), "", "", ""]));
        }
    }
    if let Some(first) = rows.first_mut() {
        first[0] = group.workload.to_owned();
    }
    rows
}

/// Returns the names of the figures that at least one provider has.
fn measures(group: &WorkloadOutcomes<'_>) -> Vec<(&'static str, Better)> {
    let mut names = Vec::new();
    for measure in group.all().into_iter().flatten().flat_map(|outcome| &outcome.measures) {
        if !names.contains(&(measure.name, measure.better)) {
            names.push((measure.name, measure.better));
        }
    }
    names
}

fn row(group: &WorkloadOutcomes<'_>, (name, better): (&'static str, Better)) -> [String; 8] {
    let value = |outcome: Option<&Outcome>| outcome.and_then(|outcome| outcome.get(name));
    let [cosmos, no_inline_claims, cdb] = group.all().map(value);
    let ratio = cosmos.zip(cdb).filter(|(cosmos, _)| *cosmos > 0.0 && better != Better::Neither);
    let goal = goal(group.workload, name);
    let arrow = match better {
        Better::Lower => " ↓",
        Better::Higher => " ↑",
        Better::Neither => "",
    };
    let met = goal.zip(cosmos).map(|(goal, cosmos)| if goal.met(cosmos) { "✓" } else { "✗" });
    [
        String::new(),
        format!("{name}{arrow}"),
        cosmos.map(number).unwrap_or_default(),
        no_inline_claims.map(number).unwrap_or_default(),
        cdb.map(number).unwrap_or_default(),
        ratio.map(|(cosmos, cdb)| number(cdb / cosmos)).unwrap_or_default(),
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

/// Lists the requests by kind, the most frequent first, one per line.
fn by_kind(kinds: &BTreeMap<&'static str, f64>) -> Vec<String> {
    let mut kinds: Vec<_> = kinds.iter().collect();
    kinds.sort_by(|a, b| b.1.total_cmp(a.1));
    kinds.iter().map(|(kind, requests)| format!("{kind} {}", number(**requests))).collect()
}

fn text_row(cells: [&str; 5]) -> [String; 8] {
    let [a, b, c, d, e] = cells.map(str::to_owned);
    [a, b, c, d, e, String::new(), String::new(), String::new()]
}

/// Formats a number with three significant digits, or with all digits from 1,000 on.
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

/// Aligns names to the left and figures to the right. A note extends over the empty columns beside it.
fn align(rows: &[[String; 8]]) -> String {
    let is_note = |row: &[String; 8]| row[2..].iter().all(String::is_empty);
    let length = |text: &String| text.chars().count();
    let width = |column: usize| rows.iter().filter(|row| !is_note(row)).map(|row| length(&row[column])).max();
    let mut widths: [usize; 8] = std::array::from_fn(|column| width(column).unwrap_or(0));
    // A workload without figures still has a name beside its note.
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

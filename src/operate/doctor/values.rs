//! Values and the custom status, compared with the histories.

use super::{
    findings::{Findings, LostValue, RepairAction},
    snapshot::{PastHistory, Snapshot},
    Reason,
};
use crate::model::{InstanceDocument, KvBase};
use duroxide::{Event, EventKind};
use std::collections::BTreeMap;

/// The custom status from the history, if the history sets it.
pub(super) fn custom_status(events: &[Event]) -> Option<Option<String>> {
    let said = |event: &Event| match &event.kind {
        EventKind::CustomStatusUpdated { status } => Some(status.clone()),
        EventKind::OrchestrationStarted { initial_custom_status: Some(status), .. } => Some(Some(status.clone())),
        _ => None,
    };
    events.iter().rev().find_map(said)
}

/// Applies events to values: each key gets the value that was set last, or `None` if it was cleared.
fn apply_events<'a>(values: &mut BTreeMap<&'a str, Option<KvBase>>, events: impl IntoIterator<Item = &'a Event>) {
    for event in events {
        match &event.kind {
            EventKind::KeyValueSet { key, value, last_updated_at_ms } => {
                values.insert(key, Some(KvBase { value: value.clone(), at: *last_updated_at_ms }));
            }
            EventKind::KeyValueCleared { key } => drop(values.insert(key, None)),
            EventKind::KeyValuesCleared => values.values_mut().for_each(|value| *value = None),
            _ => {}
        }
    }
}

/// The executions directly before the current one whose histories are complete, oldest first. An execution before a gap
/// is of no use: a missing execution may have set or cleared the values since.
fn unbroken_past<'a>(snapshot: &'a Snapshot, document: &InstanceDocument) -> impl Iterator<Item = &'a PastHistory> {
    let whole = |execution: u64| {
        let (past, ended) = (snapshot.past.get(&execution)?, snapshot.executions.get(&execution)?);
        Some(past).filter(|past| past.unreadable.is_none() && past.events == ended.events)
    };
    let unbroken: Vec<&PastHistory> = (1..document.current.execution).rev().map_while(whole).collect();
    unbroken.into_iter().rev()
}

/// Checks the values against all existing executions, and the custom status against the current execution.
pub(super) fn values(snapshot: &Snapshot, document: &InstanceDocument, findings: &mut Findings) {
    let Ok(events) = &snapshot.events else { return };
    let mut before = BTreeMap::new();
    apply_events(&mut before, unbroken_past(snapshot, document).flat_map(|past| &past.values));
    let (mut current, mut all) = (BTreeMap::new(), before.clone());
    apply_events(&mut current, events);
    apply_events(&mut all, events);
    for (key, said) in all {
        let Some(value) = said else { continue };
        let is = snapshot.values.get(key).and_then(|document| document.value.as_ref());
        if is == Some(&value.value) {
            continue;
        }
        let how = if is.is_none() { "is missing" } else { "differs from the history" };
        let is_current = current.get(key).is_some_and(Option::is_some);
        let lost = LostValue { value, is_current, before: before.get(key).cloned().flatten() };
        let does = match lost.is_current && lost.before.is_none() {
            true => "write it; its value before this execution is not known",
            false => "write it",
        };
        let fix = RepairAction::SetValue { key: key.to_owned(), lost };
        findings.fix(Reason::LostValue, key, format!("the value of key {key:?} {how}"), does, fix);
    }
    let is = snapshot.status.as_ref().map(|status| &status.value);
    match custom_status(events) {
        Some(said) if is != Some(&said) && document.commit.status_version > 0 => {
            let how = if is.is_none() { "is missing" } else { "differs from the history" };
            findings.fix(
                Reason::LostStatus,
                "",
                format!("the custom status {how}"),
                "write it",
                RepairAction::SetStatus(said),
            );
        }
        None if is.is_none() && document.commit.status_version > 0 => {
            let todo = "the history does not show its value: the next turn that sets it creates it again";
            findings.by_hand(Reason::LostStatus, "", "the custom status is missing".to_owned(), todo);
        }
        _ => {}
    }
}

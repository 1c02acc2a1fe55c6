//! Crashes and stops at requests: finds the request on the wire at which a process crashes or stops.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use duroxide_cosmos_emulator::{Gate, RequestKind, WireAction, WireRequest};
use serde_json::Value;

use super::observer::{document_id, INSTANCE};
use super::WORKER;
use crate::crash_plan::{CrashPoint, PausePoint, Trigger};

/// Crashes and stops that are planned or due.
#[derive(Debug, Default)]
pub(super) struct PendingCrashes {
    /// Processes that crash at one of their next requests, by client name.
    pub(super) clients: BTreeMap<String, CrashPoint>,
    /// Processes that have sent their last request, with the time until a new process replaces them.
    pub(super) crashed: Vec<(String, Duration)>,
    /// Crashes for the next workers that commit a staged turn.
    pub(super) staged_commits: VecDeque<CrashPoint>,
    /// Crashes for the next workers that retain a lock.
    pub(super) retained_locks: VecDeque<CrashPoint>,
    /// Stops whose trigger has not fired.
    pub(super) pause_points: Vec<PausePoint>,
    /// Stops whose trigger has fired, by client name.
    pub(super) armed_pauses: BTreeMap<String, PausePoint>,
    /// Stops that are due now, with the client name.
    pub(super) due_pauses: Vec<(String, PausePoint)>,
}

impl PendingCrashes {
    /// Cancels everything that is not due yet.
    pub(super) fn cancel(&mut self) {
        self.clients.clear();
        self.staged_commits.clear();
        self.retained_locks.clear();
        self.pause_points.clear();
        self.armed_pauses.clear();
    }
}

/// Decides whether a request is the last one of its sender. Returns the action for the last request.
pub(super) fn crash_at_request(pending: &Mutex<PendingCrashes>, request: &WireRequest<'_>) -> Option<WireAction> {
    let client = request.client?;
    let mut pending = pending.lock().unwrap_or_else(PoisonError::into_inner);
    if client.starts_with(WORKER) && !(pending.staged_commits.is_empty() && pending.retained_locks.is_empty()) {
        let crash = match trigger(request) {
            Some(Trigger::CommitsStagedTurn) => pending.staged_commits.pop_front(),
            Some(Trigger::RetainsLock) if leaves_execution_running(request) => pending.retained_locks.pop_front(),
            _ => None,
        };
        if let Some(crash) = crash {
            pending.clients.entry(client.to_owned()).or_insert(crash);
        }
    }
    let crash = pending.clients.get_mut(client)?;
    crash.requests -= 1;
    if crash.requests > 0 {
        return None;
    }
    let CrashPoint { request_arrives, downtime, .. } = pending.clients.remove(client)?;
    pending.crashed.push((client.to_owned(), downtime));
    // The sender is dead and hears no answer.
    Some(if request_arrives { WireAction::LoseAnswer } else { WireAction::HoldBefore(Gate::new()) })
}

/// Decides whether the sender of a request stops after it. The request itself is not changed.
pub(super) fn pause_at_request(pending: &Mutex<PendingCrashes>, request: &WireRequest<'_>) {
    let Some(client) = request.client.filter(|client| client.starts_with(WORKER)) else { return };
    let mut pending = pending.lock().unwrap_or_else(PoisonError::into_inner);
    if !pending.pause_points.is_empty() && !pending.armed_pauses.contains_key(client) {
        let (trigger, sends_intents) = (trigger(request), commits_intents(request));
        let fires = |point: &PausePoint| {
            Some(point.trigger) == trigger || (sends_intents && point.trigger == Trigger::CommitsIntents)
        };
        let found = pending.pause_points.iter().position(fires);
        if let Some(point) = found.map(|at| pending.pause_points.remove(at)) {
            pending.armed_pauses.insert(client.to_owned(), point);
        }
    }
    let Some(point) = pending.armed_pauses.get_mut(client) else { return };
    if point.requests > 0 {
        point.requests -= 1;
        return;
    }
    if let Some(point) = pending.armed_pauses.remove(client) {
        pending.due_pauses.push((client.to_owned(), point));
    }
}

/// The trigger that a request fires, except [`Trigger::CommitsIntents`].
fn trigger(request: &WireRequest<'_>) -> Option<Trigger> {
    if request.kind != RequestKind::Batch {
        return None;
    }
    let body = request.json()?;
    let (first, second) = (body.get(0)?, body.get(1).unwrap_or(&Value::Null));
    if commits_staged_turn(first) {
        return Some(Trigger::CommitsStagedTurn);
    }
    if first["resourceBody"]["staging"].as_array().is_some_and(|notes| !notes.is_empty()) {
        return Some(Trigger::StagesPart);
    }
    let is = |operation: &Value, kind: &str| document_id(operation).is_some_and(|id| id.starts_with(kind));
    let completes = first["operationType"] == "Delete" && is(first, "w:") && (is(second, "m:") || is(second, INSTANCE));
    if completes {
        return Some(Trigger::CompletesActivity);
    }
    let operations = body.as_array()?;
    let locked =
        operations.iter().find(|operation| is(operation, INSTANCE) && !operation["resourceBody"]["lock"].is_null())?;
    if operations.iter().any(|operation| is(operation, "h:")) {
        return Some(Trigger::RetainsLock);
    }
    (!locked["resourceBody"]["inlined"].is_null()).then_some(Trigger::ClaimsInline)
}

/// Whether a request commits messages for other instances, which are delivered after the commit.
fn commits_intents(request: &WireRequest<'_>) -> bool {
    let is_intent = |operation: &Value| operation["resourceBody"]["type"] == "intent";
    request.kind == RequestKind::Batch
        && request.json().is_some_and(|body| body.as_array().into_iter().flatten().any(is_intent))
}

/// Whether a commit leaves an execution that is still running. The messages of its next turn are sent once.
fn leaves_execution_running(request: &WireRequest<'_>) -> bool {
    let body = request.json().unwrap_or_default();
    let instance = body.as_array().into_iter().flatten().find(|operation| document_id(operation) == Some(INSTANCE));
    instance.is_some_and(|operation| operation["resourceBody"]["status"] == "Running")
}

/// Whether a batch with this first operation commits a staged turn. More requests then apply its parts.
fn commits_staged_turn(first: &Value) -> bool {
    first["resourceBody"]["rollForward"]["next"] == 0
}

//! Observes the wire: writes every exchange to the transcript and reports changed documents to the oracle.

use duroxide_cosmos_emulator::{RequestKind, WireAnswer, WireRequest};
use serde_json::Value;

use crate::fault_schedule;
use crate::oracle::Oracle;
use crate::transcript::Transcript;

/// The id of every instance document.
pub(super) const INSTANCE: &str = "instance";

/// Records one exchange.
pub(super) fn observe(transcript: &Transcript, oracle: &Oracle, request: &WireRequest<'_>, answer: &WireAnswer<'_>) {
    let partition = fault_schedule::partition(request);
    let detail = describe(request);
    transcript.record(
        request.client.unwrap_or("?"),
        partition.as_deref(),
        format!("#{} {} {detail}-> {} ({} bytes)", request.sequence, request.kind, answer.status, answer.body.len()),
    );
    if !(200..=204).contains(&answer.status) {
        return;
    }
    let partition = partition.unwrap_or_default();
    if request.kind == RequestKind::Delete {
        return record_deletion(oracle, &partition, request.document_id.unwrap_or_default());
    }
    let Some(body) = request.json() else { return };
    let record_write = |document: &Value, created: bool| {
        record_lock(oracle, document, created);
        oracle.deliveries.written(document);
        if document["type"] == "instance" {
            let violation = oracle.deletions.written(request.client.unwrap_or("?"), &partition, document);
            violation.into_iter().for_each(|violation| oracle.report(violation));
        }
    };
    match request.kind {
        RequestKind::Batch => {
            for operation in body.as_array().into_iter().flatten() {
                match operation.get("resourceBody") {
                    Some(document) => record_write(document, operation["operationType"] == "Create"),
                    None if operation["operationType"] == "Delete" => {
                        record_deletion(oracle, &partition, document_id(operation).unwrap_or_default());
                    }
                    None => {}
                }
            }
        }
        RequestKind::Create => record_write(&body, true),
        RequestKind::Replace | RequestKind::Upsert => record_write(&body, false),
        _ => {}
    }
}

/// Reports the deletion of a document to the oracle.
fn record_deletion(oracle: &Oracle, partition: &str, document: &str) {
    if document == INSTANCE {
        oracle.deletions.deleted(partition).into_iter().for_each(|violation| oracle.report(violation));
    }
    let lost = oracle.deliveries.deleted(partition, document, &oracle.deletions);
    lost.into_iter().for_each(|violation| oracle.report(violation));
    oracle.sessions.deleted(partition);
}

/// Reports the lock of a written document to the oracle.
fn record_lock(oracle: &Oracle, document: &Value, created: bool) {
    let text = |property: &str| document[property].as_str().unwrap_or("");
    if text("type") == "instance" {
        let (lock, last_turn) = (document["lock"]["token"].as_str(), document["lastTurn"].as_str());
        oracle.instance_written(text("instanceId"), lock, last_turn, created);
    }
    match text("type") {
        "instance" | "activity" => {
            let lock = &document["lock"];
            if let (Some(token), Some(until)) = (lock["token"].as_str(), lock["until"].as_u64()) {
                oracle.claimed(text("instanceId"), text("id"), token, until);
            }
        }
        "session" => {
            let until = document["lockedUntil"].as_u64().unwrap_or(0);
            oracle.claimed(text("sessionId"), "session", text("owner"), until);
            oracle.sessions.written(document);
        }
        _ => {}
    }
}

/// The document that an operation of a batch concerns.
pub(super) fn document_id(operation: &Value) -> Option<&str> {
    operation["id"].as_str().or_else(|| operation["resourceBody"]["id"].as_str())
}

/// Describes the documents of a request. Of a batch it names the first 12 operations.
pub(crate) fn describe(request: &WireRequest<'_>) -> String {
    if request.kind == RequestKind::Batch {
        let operations = request.json().unwrap_or_default();
        let operation = |operation: &Value| {
            let id = document_id(operation).unwrap_or("?");
            format!("{} {id}", operation["operationType"].as_str().unwrap_or("?"))
        };
        let mut named: Vec<String> = operations.as_array().into_iter().flatten().map(operation).collect();
        let more = named.len().saturating_sub(12);
        named.truncate(12);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        return format!("[{}{more}] ", named.join(", "));
    }
    request.document_id.map(|id| format!("{id} ")).unwrap_or_default()
}

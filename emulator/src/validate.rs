//! Checks of requests that the service refuses and the SDK's emulator accepts.
//!
//! The emulator itself refuses items over 2 MB, batches over 2 MB and batches of more than 100 operations.

use serde_json::Value;

use crate::answer::Answer;
use crate::request::{RequestDetails, RequestKind};

const MAX_ID_BYTES: usize = 1023;
const MAX_PARTITION_KEY_BYTES: usize = 2048;
const PARTITION_KEY_MISMATCH: u32 = 1001;
const ILLEGAL_IN_ID: [char; 4] = ['/', '\\', '?', '#'];

/// Returns the service's refusal of a malformed request.
pub(crate) fn refusal(details: &RequestDetails) -> Option<Answer> {
    let partition_key = details.partition_key.as_deref().and_then(check_partition_key);
    partition_key
        .or_else(|| check_target(details))
        .or_else(|| check_body(details.kind, details.body.as_ref()?))
        .map(|message| Answer::refusal(400, None, &message))
}

/// Parts of the emulator's messages for an item whose partition key differs from that of its request.
const MISMATCHES: [&str; 3] = [
    "partition key extracted from the document does not match",
    "PartitionKey extracted from document doesn't match",
    "must use the batch partition key",
];

/// Replaces the emulator's refusal of a mismatched partition key by the service's message and substatus.
pub(crate) fn corrected(answer: Answer) -> Answer {
    let is_mismatch = |text: &str| MISMATCHES.iter().any(|mismatch| text.contains(mismatch));
    if answer.status != 400 || !std::str::from_utf8(&answer.body).is_ok_and(is_mismatch) {
        return answer;
    }
    let message = "PartitionKey extracted from document doesn't match the one specified in the header.";
    Answer::refusal(400, Some(PARTITION_KEY_MISMATCH), message)
}

/// Checks the id that a point operation names, in its path or in a batch of one read.
fn check_target(details: &RequestDetails) -> Option<String> {
    match details.kind {
        RequestKind::Read | RequestKind::Replace | RequestKind::Delete => check_id(details.document_id.as_deref()?),
        _ => None,
    }
}

fn check_body(kind: RequestKind, body: &Value) -> Option<String> {
    match kind {
        RequestKind::Create | RequestKind::Upsert | RequestKind::Replace => check_item(body),
        RequestKind::Batch | RequestKind::Read => body.as_array()?.iter().find_map(check_operation),
        _ => None,
    }
}

/// Checks the item that the operation names and the item that it stores.
fn check_operation(operation: &Value) -> Option<String> {
    let named = operation.get("id").and_then(check_id_value);
    named.or_else(|| check_item(operation.get("resourceBody")?))
}

/// Checks the id of an item. A patch in a batch has no item, so it has no id.
fn check_item(item: &Value) -> Option<String> {
    check_id_value(item.get("id")?)
}

fn check_id_value(id: &Value) -> Option<String> {
    match id.as_str() {
        Some(id) => check_id(id),
        None => Some(format!("The input content is invalid because the required property 'id' is not a string: {id}.")),
    }
}

/// Checks an id. The service accepts control characters and a trailing space on creation, but answers every later read
/// and deletion of the item with 400 or 401. This check refuses such ids at once.
fn check_id(id: &str) -> Option<String> {
    if id.is_empty() || id.len() > MAX_ID_BYTES {
        let length = id.len();
        return Some(format!(
            "The input name of {length} bytes is invalid. Ensure to provide a unique non-empty string less than '1024' characters."
        ));
    }
    if id.ends_with(' ') {
        return Some("Id ends with a space.".to_owned());
    }
    let illegal = id.chars().find(|c| ILLEGAL_IN_ID.contains(c) || c.is_ascii_control())?;
    Some(format!("Id contains illegal chars: {illegal:?}."))
}

fn check_partition_key(header: &str) -> Option<String> {
    let components: Vec<Value> = serde_json::from_str(header).ok()?;
    let longest = components.iter().filter_map(Value::as_str).map(str::len).max()?;
    (longest > MAX_PARTITION_KEY_BYTES).then(|| {
        format!("The partition key supplied has {longest} bytes and exceeds the allowed limit of {MAX_PARTITION_KEY_BYTES}.")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_follow_the_rules_of_the_service() {
        for good in ["a", "instance:1", "ü", " a b", &"x".repeat(MAX_ID_BYTES)] {
            assert_eq!(check_id(good), None, "{good}");
        }
        for bad in ["", " ", "a/b", "a\\b", "a?", "#", "a ", "a\tb", "a\n", &"x".repeat(MAX_ID_BYTES + 1)] {
            assert!(check_id(bad).is_some(), "{bad}");
        }
    }

    #[test]
    fn partition_keys_are_measured_in_bytes() {
        let header = |value: String| serde_json::json!([value]).to_string();
        assert_eq!(check_partition_key(&header("x".repeat(2048))), None);
        assert!(check_partition_key(&header("ü".repeat(1025))).is_some());
        assert_eq!(check_partition_key("[{}]"), None);
    }
}

//! What the service refuses and the SDK's emulator lets through.
//!
//! The emulator itself refuses items over 2 MB, batches over 2 MB and batches of more than 100 operations.

use serde_json::Value;

use crate::answer::Answer;
use crate::request::{Facts, RequestKind};

const MAX_ID_BYTES: usize = 1023;
const MAX_PARTITION_KEY_BYTES: usize = 2048;
const ILLEGAL_IN_ID: [char; 4] = ['/', '\\', '?', '#'];

/// The service's refusal, if it would refuse this request for its shape.
pub(crate) fn refusal(facts: &Facts) -> Option<Answer> {
    let partition_key = facts.partition_key.as_deref().and_then(check_partition_key);
    partition_key
        .or_else(|| check_body(facts.kind, facts.body.as_ref()?))
        .map(|message| Answer::refusal(400, None, &message))
}

fn check_body(kind: RequestKind, body: &Value) -> Option<String> {
    match kind {
        RequestKind::Create | RequestKind::Upsert | RequestKind::Replace => check_item(body),
        RequestKind::Batch => body.as_array()?.iter().find_map(check_operation),
        _ => None,
    }
}

/// Reads and deletions in a batch name items that exist, or don't: only what is stored is checked.
fn check_operation(operation: &Value) -> Option<String> {
    let body = operation.get("resourceBody")?;
    check_item(operation).or_else(|| check_item(body))
}

/// An item without an id is the emulator's to refuse.
fn check_item(item: &Value) -> Option<String> {
    check_id(item.get("id")?.as_str()?)
}

fn check_id(id: &str) -> Option<String> {
    if id.is_empty() || id.len() > MAX_ID_BYTES {
        let length = id.len();
        return Some(format!(
            "The input name of {length} bytes is invalid. Ensure to provide a unique non-empty string less than '1024' characters."
        ));
    }
    let illegal = id.chars().find(|c| ILLEGAL_IN_ID.contains(c))?;
    Some(format!("Id contains illegal chars: '{illegal}'."))
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
    fn ids_are_held_to_the_services_rules() {
        for good in ["a", "instance:1", "ü", &"x".repeat(MAX_ID_BYTES)] {
            assert_eq!(check_id(good), None, "{good}");
        }
        for bad in ["", "a/b", "a\\b", "a?", "#", &"x".repeat(MAX_ID_BYTES + 1)] {
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

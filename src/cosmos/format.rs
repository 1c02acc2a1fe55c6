//! The format of a container's documents, which it carries itself.
//!
//! Invariant: nobody reads or writes documents of a container before its format was found to be the one that this version
//! knows. Whoever opens a container that has none writes it; of several at once one does, and the others read it.

use super::{ContainerLocation, Deadline, Freshness, Store, StoreError, WriteOutcome};
use crate::model::{FormatDocument, FORMAT};
use serde_json::Value;
use tracing::info;

/// Makes sure that the container's documents are of the format that this version knows.
pub(super) async fn agree(store: &Store, deadline: Deadline) -> Result<(), StoreError> {
    let ours = FormatDocument::new();
    loop {
        if read(store, deadline).await?.is_some() {
            return Ok(());
        }
        if let WriteOutcome::Done(_) = store.create(&ours.instance_id, &ours.id, &ours, deadline).await? {
            info!(format = FORMAT, "noted the format of the container's documents");
            return Ok(());
        }
    }
}

/// The format that the container carries, if it does; an error where it is not the one that this version knows.
pub(super) async fn read(store: &Store, deadline: Deadline) -> Result<Option<u32>, StoreError> {
    let ours = FormatDocument::new();
    // Any other region may not have heard of it yet.
    let freshness = Freshness::Authoritative;
    let found = store.read::<Value>(&ours.instance_id, &ours.id, freshness, deadline).await?;
    let Some(found) = found else { return Ok(None) };
    check(&store.inner.place, &found.document).map(|()| Some(FORMAT))
}

fn check(place: &ContainerLocation, document: &Value) -> Result<(), StoreError> {
    const ELSEWHERE: &str = "name another container: COSMOS_CONTAINER, or with_container";
    let version = env!("CARGO_PKG_VERSION");
    let knows = format!("duroxide-cosmos {version} knows format {FORMAT} only");
    let unfit = |problem: String, remedy: String| {
        Err(StoreError::Unfit { container: place.container.clone(), problem, remedy })
    };
    match document.get("format").and_then(Value::as_u64) {
        Some(format) if format == u64::from(FORMAT) => Ok(()),
        Some(format) if format > 0 => unfit(
            format!("its documents are of format {format}{}, and {knows}", by(document)),
            format!("Use a version of duroxide-cosmos that knows format {format}, or {ELSEWHERE}"),
        ),
        _ => unfit(
            format!(
                "its document {:?} in partition {:?} names no format that ever was, and {knows}",
                FormatDocument::document_id().as_str(),
                FormatDocument::partition().as_str()
            ),
            format!("Find out who wrote it, or {ELSEWHERE}"),
        ),
    }
}

/// Who wrote it, where the document says so.
fn by(document: &Value) -> String {
    let version = document.get("writtenBy").and_then(Value::as_str);
    version.map(|version| format!(" (first written by version {version})")).unwrap_or_default()
}

//! The format document of a container: it holds the format number of all other documents.
//!
//! Invariant: a provider reads and writes other documents only after it has found the format number that it knows.
//! The first provider that opens a container writes the format document. If several open it at once, one of them
//! creates the document and the others read it.

use super::{ContainerLocation, Deadline, Freshness, Store, StoreError, WriteOutcome};
use crate::model::{FormatDocument, FORMAT};
use serde_json::Value;
use tracing::info;

/// Checks the container's format, and writes the format document if it is missing.
pub(super) async fn ensure(store: &Store, deadline: Deadline) -> Result<(), StoreError> {
    let ours = FormatDocument::new();
    loop {
        if read(store, deadline).await?.is_some() {
            return Ok(());
        }
        if let WriteOutcome::Done(_) = store.create(&ours.instance_id, &ours.id, &ours, deadline).await? {
            info!(format = FORMAT, "wrote the format document of the container");
            return Ok(());
        }
    }
}

/// The container's format, or none if no provider has opened it yet. An error if it is not the format of this version.
pub(super) async fn read(store: &Store, deadline: Deadline) -> Result<Option<u32>, StoreError> {
    let ours = FormatDocument::new();
    // Another region may not have the document yet.
    let freshness = Freshness::Authoritative;
    let found = store.read::<Value>(&ours.instance_id, &ours.id, freshness, deadline).await?;
    let Some(found) = found else { return Ok(None) };
    check(&store.inner.location, &found.document).map(|()| Some(FORMAT))
}

fn check(location: &ContainerLocation, document: &Value) -> Result<(), StoreError> {
    const ELSEWHERE: &str = "name another container: COSMOS_CONTAINER, or with_container";
    let version = env!("CARGO_PKG_VERSION");
    let supported = format!("duroxide-cosmos {version} supports only format {FORMAT}");
    let unfit = |problem: String, remedy: String| {
        Err(StoreError::Unfit { container: location.container.clone(), problem, remedy })
    };
    match document.get("format").and_then(Value::as_u64) {
        Some(format) if format == u64::from(FORMAT) => Ok(()),
        Some(format) if format > 0 => unfit(
            format!("its documents have format {format}{}, and {supported}", writer(document)),
            format!("Use a version of duroxide-cosmos that supports format {format}, or {ELSEWHERE}"),
        ),
        _ => unfit(
            format!(
                "its document {:?} in partition {:?} has no valid format number, and {supported}",
                FormatDocument::document_id().as_str(),
                FormatDocument::partition().as_str()
            ),
            format!("Find the application that wrote the document, or {ELSEWHERE}"),
        ),
    }
}

/// The version that wrote the format document, if the document names it.
fn writer(document: &Value) -> String {
    let version = document.get("writtenBy").and_then(Value::as_str);
    version.map(|version| format!(" (first written by version {version})")).unwrap_or_default()
}

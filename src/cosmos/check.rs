//! Checks an account like opening does, with one line for each check. It creates and changes nothing.
//!
//! To test the permission to write, the check replaces and deletes a document that does not exist. The service
//! answers 404 to an identity that may write, and 403 to one that may not.

use super::{
    bootstrap::{ContainerState, Opening},
    connect, deep_check, format, queries, Deadline, Store, StoreError,
};
use crate::{
    config::CosmosDBProviderConfig,
    model::{DocumentId, Partition},
};
use azure_data_cosmos::models::ContainerProperties;
use std::time::Duration;

/// The result of one check, with its text.
pub(crate) enum CheckLine {
    /// The account is as it must be.
    Ok(String),
    /// The provider works, but at a cost.
    Warning(String),
    /// The provider can't use the account. The text says what to do.
    Failed(String),
    /// The service differs from an assumption of the provider. The text names the consequence.
    Differs(String),
    /// The check can't read the property.
    Unknown(String),
}

impl CheckLine {
    fn of(outcome: Result<(), StoreError>, text: impl Into<String>) -> Self {
        match outcome {
            Ok(()) => Self::Ok(text.into()),
            Err(error) => Self::Failed(error.to_string()),
        }
    }
}

/// The time limit of the requests.
const TIME: Duration = Duration::from_secs(20);

/// The depth of the check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CheckDepth {
    /// The checks of opening. Writes nothing.
    Opening,
    /// Every assumption about the service. Writes documents and removes them.
    Deep,
}

/// Makes all checks, up to one whose failure makes the next ones impossible.
pub(crate) async fn check_account(config: &CosmosDBProviderConfig, depth: CheckDepth) -> Vec<(String, CheckLine)> {
    let (lines, store) = check_opening(config).await;
    let mut lines: Vec<(String, CheckLine)> =
        lines.into_iter().map(|(subject, line)| (subject.to_owned(), line)).collect();
    let has_failed = lines.iter().any(|(_, line)| matches!(line, CheckLine::Failed(_)));
    match store {
        Some(store) if depth == CheckDepth::Deep && !has_failed => lines.extend(deep_check::run(&store).await),
        Some(_) if depth == CheckDepth::Deep => {
            let line = CheckLine::Failed("not begun: first repair the failed checks above".to_owned());
            lines.push(("deep check".to_owned(), line));
        }
        _ => {}
    }
    lines
}

/// Makes the checks of opening. Also returns the store, if there is a container.
async fn check_opening(config: &CosmosDBProviderConfig) -> (Vec<(&'static str, CheckLine)>, Option<Store>) {
    let (client, tokens) = match connect::connect(config).await {
        Ok(connected) => connected,
        Err(error) => return (vec![("account", CheckLine::Failed(error.to_string()))], None),
    };
    let mut lines = vec![("account", CheckLine::Ok("answers, and accepts the credential".to_owned()))];
    let opening = Opening::new(client.endpoint().host_str(), config, TIME).with_tokens(tokens);
    match opening.inspect(&client).await {
        Ok(ContainerState { container, properties }) => {
            lines.push(("container", CheckLine::Ok("exists".to_owned())));
            lines.extend(check_properties(&opening, &properties));
            lines.push(("throughput", opening.throughput(&container).await));
            let regions = opening.check_write_regions(&container).await;
            lines.push(("regions", CheckLine::of(regions, "writes go to one region")));
            let store = opening.store(container);
            lines.extend(check_documents(&store, opening.deadline()).await);
            (lines, Some(store))
        }
        Err(StoreError::Missing { .. }) if config.create_if_missing() => {
            let line = "does not exist: the first provider that opens it creates it, if its credential allows that";
            lines.push(("container", CheckLine::Warning(line.to_owned())));
            (lines, None)
        }
        Err(error) => {
            lines.push(("container", CheckLine::Failed(error.to_string())));
            (lines, None)
        }
    }
}

/// Checks the properties of the container.
fn check_properties(opening: &Opening<'_>, properties: &ContainerProperties) -> [(&'static str, CheckLine); 3] {
    let key = opening.check_partition_key(&properties.partition_key);
    let time_to_live = match opening.check_time_to_live(&properties.default_ttl) {
        Ok(None) => CheckLine::Ok("on, without a default".to_owned()),
        Ok(Some(remark)) => CheckLine::Warning(remark),
        Err(error) => CheckLine::Failed(error.to_string()),
    };
    [
        ("partition key", CheckLine::of(key, "/instanceId, version 2")),
        ("index", CheckLine::of(opening.check_index(properties), "covers every query")),
        ("time to live", time_to_live),
    ]
}

/// Checks the format, the permissions and the consistency.
async fn check_documents(store: &Store, deadline: Deadline) -> [(&'static str, CheckLine); 3] {
    let format = match format::read(store, deadline).await {
        Ok(Some(format)) => CheckLine::Ok(format!("{format}")),
        Ok(None) => CheckLine::Ok("none yet: the first provider that opens the container writes it".to_owned()),
        Err(error) => CheckLine::Failed(error.to_string()),
    };
    let permissions = test_permissions(store, deadline).await;
    let consistency = "the account's default can't be read here: it must be Session or stronger";
    [
        ("format", format),
        ("role", CheckLine::of(permissions, "the identity may read, query and write documents")),
        ("consistency", CheckLine::Unknown(consistency.to_owned())),
    ]
}

/// Tests the permission to query, replace and delete documents.
async fn test_permissions(store: &Store, deadline: Deadline) -> Result<(), StoreError> {
    let (partition, absent) = (Partition::system("check"), DocumentId::new("check", &[]));
    store.query_partition::<serde_json::Value>(&partition, queries::VALUES.statement(), deadline).await?;
    let document = serde_json::json!({ "id": absent, "instanceId": partition });
    store.replace(&partition, &absent, &document, None, deadline).await?;
    store.delete(&partition, &absent, None, deadline).await.map(drop)
}

//! What opening a container looks at, one after the other, and told apart. Nothing is made or changed.
//!
//! Whether documents may be written is found out with the replacement and the deletion of one that is not there: 404 to those who may, 403 to
//! those who may not.

use super::{
    bootstrap::{ContainerState, Opening},
    connect, deep_check, format, queries, Deadline, Store, StoreError,
};
use crate::{
    config::CosmosDBProviderConfig,
    model::{DocumentId, Partition},
};
use std::time::Duration;

/// What was found.
pub(crate) enum CheckLine {
    Ok(String),
    /// It activities, but costs something.
    Warning(String),
    /// What is wrong, and what to do.
    Failed(String),
    /// The service behaves otherwise than the provider assumes, and what follows.
    Differs(String),
    /// It can't be seen from here.
    Unknown(String),
}

impl CheckLine {
    fn of(outcome: Result<(), StoreError>, fine: impl Into<String>) -> Self {
        match outcome {
            Ok(()) => Self::Ok(fine.into()),
            Err(error) => Self::Failed(error.to_string()),
        }
    }
}

/// Nobody waits for a probe for long.
const TIME: Duration = Duration::from_secs(20);

/// How much is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    /// What opening looks at. Nothing is written.
    Opening,
    /// Every assumption about the service, with documents that are removed again.
    Deep,
}

/// Looks at everything, up to the first that keeps the others from being looked at.
pub(crate) async fn run(config: &CosmosDBProviderConfig, depth: Depth) -> Vec<(String, CheckLine)> {
    let (lines, store) = opening(config).await;
    let mut lines: Vec<(String, CheckLine)> =
        lines.into_iter().map(|(subject, line)| (subject.to_owned(), line)).collect();
    let is_wrong = lines.iter().any(|(_, line)| matches!(line, CheckLine::Failed(_)));
    match store {
        Some(store) if depth == Depth::Deep && !is_wrong => lines.extend(deep_check::run(&store).await),
        Some(_) if depth == Depth::Deep => {
            let line = CheckLine::Failed("not begun: something above must be put right first".to_owned());
            lines.push(("deep check".to_owned(), line));
        }
        _ => {}
    }
    lines
}

/// What opening looks at, and the store if there is one.
async fn opening(config: &CosmosDBProviderConfig) -> (Vec<(&'static str, CheckLine)>, Option<Store>) {
    let mut lines = Vec::new();
    let (client, tokens) = match connect::connect(config).await {
        Ok(connected) => connected,
        Err(error) => return (vec![("account", CheckLine::Failed(error.to_string()))], None),
    };
    lines.push(("account", CheckLine::Ok("it answers, and the credential is accepted".to_owned())));
    let opening = Opening::new(client.endpoint().host_str(), config, TIME).with_tokens(tokens);
    let ContainerState { container, properties } = match opening.inspect(&client).await {
        Ok(found) => found,
        Err(StoreError::Missing { .. }) if config.create_if_missing() => {
            let line = "it is not there: into_inner opens it first makes it, if that may be";
            lines.push(("container", CheckLine::Warning(line.to_owned())));
            return (lines, None);
        }
        Err(error) => {
            lines.push(("container", CheckLine::Failed(error.to_string())));
            return (lines, None);
        }
    };
    lines.push(("container", CheckLine::Ok("it is there".to_owned())));
    let key = opening.check_partition_key(&properties.partition_key);
    lines.push(("partition key", CheckLine::of(key, "/instanceId, version 2")));
    lines.push(("index", CheckLine::of(opening.check_index(&properties), "covers every query")));
    let time_to_live = match opening.check_time_to_live(&properties.default_ttl) {
        Ok(None) => CheckLine::Ok("on, without a default".to_owned()),
        Ok(Some(remark)) => CheckLine::Warning(remark),
        Err(error) => CheckLine::Failed(error.to_string()),
    };
    lines.push(("time to live", time_to_live));
    lines.push(("throughput", opening.throughput(&container).await));
    let regions = opening.check_write_regions(&container).await;
    lines.push(("regions", CheckLine::of(regions, "writes go to one region")));
    let store = opening.store(container);
    let format = match format::read(&store, opening.deadline()).await {
        Ok(Some(format)) => CheckLine::Ok(format!("{format}")),
        Ok(None) => CheckLine::Ok("none yet: into_inner opens the container first notes it".to_owned()),
        Err(error) => CheckLine::Failed(error.to_string()),
    };
    lines.push(("format", format));
    lines.push((
        "role",
        CheckLine::of(may_write(&store, opening.deadline()).await, "documents may be read, queried and written"),
    ));
    let consistency = "the account's default can't be seen from here: it must be Session or stronger";
    lines.push(("consistency", CheckLine::Unknown(consistency.to_owned())));
    (lines, Some(store))
}

/// Whether documents may be queried, replaced and deleted.
async fn may_write(store: &Store, deadline: Deadline) -> Result<(), StoreError> {
    let (partition, nothing) = (Partition::system("check"), DocumentId::new("check", &[]));
    store.query_partition::<serde_json::Value>(&partition, queries::VALUES.statement(), deadline).await?;
    let document = serde_json::json!({ "id": nothing, "instanceId": partition });
    store.replace(&partition, &nothing, &document, None, deadline).await?;
    store.delete(&partition, &nothing, None, deadline).await.map(drop)
}

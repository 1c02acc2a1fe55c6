//! What opening a container looks at, one after the other, and told apart. Nothing is made or changed.
//!
//! Whether documents may be written is found out with the replacement and the deletion of one that is not there: 404 to those who may, 403 to
//! those who may not.

use super::{
    bootstrap::{Found, Opening},
    connect, format, queries, Deadline, Store, StoreError,
};
use crate::{
    config::CosmosDBProviderConfig,
    model::{DocumentId, Partition},
};
use std::time::Duration;

/// What was found.
pub(crate) enum Line {
    Fine(String),
    /// It works, but costs something.
    Poor(String),
    /// What is wrong, and what to do.
    Wrong(String),
}

impl Line {
    fn of(outcome: Result<(), StoreError>, fine: impl Into<String>) -> Self {
        match outcome {
            Ok(()) => Self::Fine(fine.into()),
            Err(error) => Self::Wrong(error.to_string()),
        }
    }
}

/// Nobody waits for a probe for long.
const TIME: Duration = Duration::from_secs(20);

/// Looks at everything, up to the first that keeps the others from being looked at.
pub(crate) async fn run(config: &CosmosDBProviderConfig) -> Vec<(&'static str, Line)> {
    let mut lines = Vec::new();
    let client = match connect::client(config).await {
        Ok(client) => client,
        Err(error) => return vec![("account", Line::Wrong(error.to_string()))],
    };
    lines.push(("account", Line::Fine("it answers, and the credential is accepted".to_owned())));
    let opening = Opening::new(client.endpoint().host_str(), config, TIME);
    let Found { container, properties } = match opening.inspect(&client).await {
        Ok(found) => found,
        Err(StoreError::Missing { .. }) if config.create_if_missing() => {
            let line = "it is not there: whoever opens it first makes it, if that may be";
            lines.push(("container", Line::Poor(line.to_owned())));
            return lines;
        }
        Err(error) => {
            lines.push(("container", Line::Wrong(error.to_string())));
            return lines;
        }
    };
    lines.push(("container", Line::Fine("it is there".to_owned())));
    let key = opening.check_partition_key(&properties.partition_key);
    lines.push(("partition key", Line::of(key, "/instanceId, version 2")));
    lines.push(("index", Line::of(opening.check_index(&properties), "covers every query")));
    let time_to_live = match opening.check_time_to_live(&properties.default_ttl) {
        Ok(None) => Line::Fine("on, without a default".to_owned()),
        Ok(Some(remark)) => Line::Poor(remark),
        Err(error) => Line::Wrong(error.to_string()),
    };
    lines.push(("time to live", time_to_live));
    let regions = opening.check_write_regions(&container).await;
    lines.push(("regions", Line::of(regions, "writes go to one region")));
    let store = opening.store(container);
    let format = match format::read(&store, opening.deadline()).await {
        Ok(Some(format)) => Line::Fine(format!("{format}")),
        Ok(None) => Line::Fine("none yet: whoever opens the container first notes it".to_owned()),
        Err(error) => Line::Wrong(error.to_string()),
    };
    lines.push(("format", format));
    lines.push((
        "role",
        Line::of(may_write(&store, opening.deadline()).await, "documents may be read, queried and written"),
    ));
    let consistency = "whatever the account's default is, reads ask for session consistency, and those that decide go where writes go";
    lines.push(("consistency", Line::Fine(consistency.to_owned())));
    lines
}

/// Whether documents may be queried, replaced and deleted.
async fn may_write(store: &Store, deadline: Deadline) -> Result<(), StoreError> {
    let (partition, nothing) = (Partition::system("check"), DocumentId::new("check", &[]));
    store.query_partition::<serde_json::Value>(&partition, queries::VALUES.statement(), deadline).await?;
    let document = serde_json::json!({ "id": nothing, "instanceId": partition });
    store.replace(&partition, &nothing, &document, None, deadline).await?;
    store.delete(&partition, &nothing, None, deadline).await.map(drop)
}

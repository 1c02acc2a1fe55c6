//! Direct changes of the container that the validation suite asks for.

use azure_data_cosmos::{ContainerClient, FeedScope, Query};
use duroxide::providers::{Provider, TagFilter};
use duroxide_cosmos::CosmosDBProviderConfig;
use futures::TryStreamExt;
use serde_json::Value;
use std::time::Duration;

async fn documents(container: &ContainerClient, instance: &str, kind: &str) -> Vec<Value> {
    let query = Query::from("SELECT * FROM c WHERE c.type = @type").with_parameter("@type", kind).unwrap();
    let scope = FeedScope::partition(instance.to_owned());
    container.query_items(query, scope, None).await.unwrap().try_collect().await.unwrap()
}

async fn replace(container: &ContainerClient, instance: &str, document: &Value) {
    let id = document["id"].as_str().unwrap();
    container.replace_item(instance.to_owned(), id, document, None).await.unwrap();
}

/// Makes an instance's history unreadable.
pub async fn corrupt_history(container: &ContainerClient, instance: &str) {
    for mut document in documents(container, instance, "history").await {
        document["events"] = serde_json::json!(["NOT AN EVENT"]);
        replace(container, instance, &document).await;
    }
    // A cache that goes by the instance's ETag must notice, once what it saw just before has become stale.
    for document in documents(container, instance, "instance").await {
        replace(container, instance, &document).await;
    }
    tokio::time::sleep(CosmosDBProviderConfig::default().read_staleness()).await;
}

/// The largest number of attempts of an instance's messages.
pub async fn max_attempts(container: &ContainerClient, instance: &str) -> u32 {
    let claims: Vec<u64> = documents(container, instance, "instance")
        .await
        .iter()
        .flat_map(|d| d["claims"].as_array().cloned().unwrap_or_default())
        .filter_map(|claim| claim.as_u64())
        .collect();
    let attempts = |message: &Value| {
        let visible = message["due"].as_u64().unwrap().max(message["createdAt"].as_u64().unwrap());
        let seen = claims.iter().filter(|claim| **claim >= visible).count() as u64;
        (message["attempts"].as_u64().unwrap_or(0) + seen) as u32
    };
    documents(container, instance, "message").await.iter().map(attempts).max().unwrap_or(0)
}

/// The first requests of a client resolve the account and the container: not part of what a test measures.
pub async fn warm_up(provider: &dyn Provider) {
    let second = Duration::from_secs(1);
    provider.fetch_orchestration_item(second, Duration::ZERO, None).await.expect("nothing to fetch");
    provider.fetch_work_item(second, Duration::ZERO, None, &TagFilter::Any).await.expect("nothing to fetch");
}

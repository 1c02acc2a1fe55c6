//! Items expire after their own time to live or the default of their container.

use std::time::Duration;

use azure_data_cosmos::models::{ContainerProperties, TimeToLive};
use azure_data_cosmos::{ContainerClient, TransactionalBatch};
use duroxide_cosmos_emulator::{LocalAccount, Misbehaviour};
use serde_json::{json, Value};

use crate::fixture::*;

async fn container_with(account: &LocalAccount, default: Option<TimeToLive>) -> ContainerClient {
    let client = account.client().await;
    let mut properties = ContainerProperties::new(CONTAINER, "/pk".into());
    if let Some(default) = default {
        properties = properties.with_default_ttl(default);
    }
    client.create_database(DATABASE, None).await.unwrap();
    client.database_client(DATABASE).create_container(properties, None).await.unwrap();
    open_container(&client).await
}

fn item_with_ttl(id: &str, ttl: i64) -> Value {
    json!({ "id": id, "pk": "p", "value": 1, "ttl": ttl })
}

async fn ids(container: &ContainerClient) -> Vec<String> {
    query(container, "SELECT * FROM c ORDER BY c.id").await.into_iter().map(|item| item.id).collect()
}

/// Waits until an item with a time to live of one second has expired. The clock counts whole seconds.
async fn wait_for_expiry() {
    tokio::time::sleep(Duration::from_millis(2100)).await;
}

#[tokio::test]
async fn an_item_with_a_time_to_live_disappears() {
    let account = LocalAccount::new();
    let container = container_with(&account, Some(TimeToLive::NoDefault)).await;
    for (id, ttl) in [("short", 1), ("long", 1000), ("never", -1)] {
        container.create_item("p", id, item_with_ttl(id, ttl), None).await.unwrap();
    }
    let batch = TransactionalBatch::new("p").create_item(item_with_ttl("batched", 1)).unwrap();
    container.execute_transactional_batch(batch, None).await.unwrap();
    container.create_item("p", "plain", item("p", "plain", 1), None).await.unwrap();
    wait_for_expiry().await;
    assert_eq!(account.documents(DATABASE, CONTAINER).len(), 3);
    assert_eq!(read(&container, "p", "short").await, None);
    assert_eq!(ids(&container).await, ["long", "never", "plain"]);
    container.create_item("p", "short", item("p", "short", 1), None).await.unwrap();
    container.create_item("p", "batched", item("p", "batched", 1), None).await.unwrap();
}

#[tokio::test]
async fn the_default_of_a_container_applies_to_items_without_their_own_time() {
    let account = LocalAccount::new();
    let container = container_with(&account, Some(TimeToLive::Seconds(1))).await;
    container.create_item("p", "default", item("p", "default", 1), None).await.unwrap();
    container.create_item("p", "long", item_with_ttl("long", 1000), None).await.unwrap();
    assert!(account.put(DATABASE, CONTAINER, "p", &json!({ "id": "put", "pk": "p", "value": 1 })).await);
    wait_for_expiry().await;
    assert_eq!(ids(&container).await, ["long"]);
}

#[tokio::test]
async fn a_write_restarts_the_time_of_an_item() {
    let account = LocalAccount::new();
    let container = container_with(&account, Some(TimeToLive::NoDefault)).await;
    container.create_item("p", "1", item_with_ttl("1", 1), None).await.unwrap();
    container.create_item("p", "2", item_with_ttl("2", 1), None).await.unwrap();
    container.replace_item("p", "1", item_with_ttl("1", 1000), None).await.unwrap();
    container.replace_item("p", "2", item("p", "2", 2), None).await.unwrap();
    wait_for_expiry().await;
    assert_eq!(ids(&container).await, ["1", "2"]);
}

#[tokio::test]
async fn without_a_default_no_item_expires() {
    let account = LocalAccount::new();
    let container = container_with(&account, None).await;
    container.create_item("p", "1", item_with_ttl("1", 1), None).await.unwrap();
    wait_for_expiry().await;
    assert_eq!(ids(&container).await, ["1"]);
}

#[tokio::test]
async fn an_account_can_ignore_the_time_to_live() {
    let account = LocalAccount::new();
    let container = container_with(&account, Some(TimeToLive::Seconds(1))).await;
    let ignored = account.wire().misbehave(Misbehaviour::NoTimeToLive);
    container.create_item("p", "1", item_with_ttl("1", 1), None).await.unwrap();
    wait_for_expiry().await;
    assert_eq!(account.documents(DATABASE, CONTAINER).len(), 1);
    assert_eq!(ids(&container).await, ["1"]);
    ignored.remove();
    assert_eq!(ids(&container).await.len(), 0);
}

#[tokio::test]
async fn a_later_default_of_a_container_applies_to_its_existing_items() {
    let account = LocalAccount::new();
    let container = container_with(&account, None).await;
    container.create_item("p", "1", item("p", "1", 1), None).await.unwrap();
    let properties: ContainerProperties = container.read(None).await.unwrap().into_model().unwrap();
    container.replace(properties.with_default_ttl(TimeToLive::Seconds(1)), None).await.unwrap();
    wait_for_expiry().await;
    assert_eq!(ids(&container).await.len(), 0);
}

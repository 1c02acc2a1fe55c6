//! The fixture of these tests: an item, a container, and a few SDK calls.

use azure_data_cosmos::models::ContainerProperties;
use azure_data_cosmos::{ContainerClient, CosmosClient, FeedScope, Query};
use futures::TryStreamExt;
use serde::{Deserialize, Serialize};

pub const DATABASE: &str = "db";
pub const CONTAINER: &str = "items";

#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct Item {
    pub id: String,
    pub pk: String,
    pub value: i64,
}

pub fn item(pk: &str, id: &str, value: i64) -> Item {
    Item { id: id.to_owned(), pk: pk.to_owned(), value }
}

/// Creates the database and the container.
pub async fn create_container(client: &CosmosClient) -> ContainerClient {
    let properties = ContainerProperties::new(CONTAINER, "/pk".into());
    client.create_database(DATABASE, None).await.unwrap();
    client.database_client(DATABASE).create_container(properties, None).await.unwrap();
    open_container(client).await
}

/// Opens the container that another client created.
pub async fn open_container(client: &CosmosClient) -> ContainerClient {
    let database = client.database_client(DATABASE);
    database.container_client(CONTAINER, None).await.unwrap()
}

/// Queries across all partitions.
pub async fn query(container: &ContainerClient, text: &str) -> Vec<Item> {
    let scope = FeedScope::full_container();
    let pages = container.query_items(Query::from(text), scope, None).await;
    pages.unwrap().try_collect().await.unwrap()
}

pub async fn read(container: &ContainerClient, pk: &str, id: &str) -> Option<Item> {
    match container.read_item(pk.to_owned(), id, None).await {
        Ok(response) => Some(response.into_model().unwrap()),
        Err(error) if status(&error) == 404 => None,
        Err(error) => panic!("{error}"),
    }
}

/// Calls every item operation of the SDK once.
pub async fn use_every_operation(client: &CosmosClient) -> ContainerClient {
    use azure_data_cosmos::options::{ItemWriteOptions, Precondition};
    use azure_data_cosmos::TransactionalBatch;

    let container = create_container(client).await;
    let first = item("a", "1", 1);
    let created = container.create_item("a", "1", &first, None).await.unwrap();
    let etag = created.headers().etag().unwrap().clone();
    let conditional = || Some(ItemWriteOptions::default().with_precondition(Precondition::if_match(etag.clone())));
    let second = item("a", "1", 2);
    let replaced = container.replace_item("a", "1", &second, conditional());
    replaced.await.unwrap();
    let stale = container.replace_item("a", "1", &first, conditional());
    assert_eq!(status(&stale.await.unwrap_err()), 412);
    assert_eq!(read(&container, "a", "1").await, Some(second));

    let batch = TransactionalBatch::new("a").create_item(item("a", "2", 3)).unwrap().delete_item("1", None);
    let done = container.execute_transactional_batch(batch, None).await;
    assert!(done.unwrap().into_model().unwrap().results().iter().all(|r| r.is_success()));
    container.upsert_item("b", "1", item("b", "1", 4), None).await.unwrap();
    container.delete_item("a", "2", None).await.unwrap();
    assert_eq!(query(&container, "SELECT * FROM c").await, [item("b", "1", 4)]);
    container
}

pub fn status(error: &azure_data_cosmos::CosmosError) -> u16 {
    u16::from(error.status().status_code())
}

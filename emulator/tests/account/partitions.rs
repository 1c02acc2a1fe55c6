//! Physical partitions: queries that name one, splits and merges.

use std::num::NonZeroU32;

use azure_data_cosmos::feed::FeedRange;
use azure_data_cosmos::options::ReadFeedRangesOptions;
use azure_data_cosmos::{ContainerClient, FeedScope, Query, TransactionalBatch};
use duroxide_cosmos_emulator::{LocalAccount, Misbehaviour};
use futures::TryStreamExt;

use crate::fixture::*;

const ALL: &str = "SELECT * FROM c ORDER BY c[\"value\"]";

async fn account_with(partitions: u32) -> (LocalAccount, ContainerClient) {
    let account = LocalAccount::builder().with_partitions(partitions).build();
    let container = create_container(&account.client().await).await;
    for n in 0..40 {
        let pk = format!("pk{n}");
        container.create_item(pk.clone(), "1", item(&pk, "1", n), None).await.unwrap();
    }
    (account, container)
}

async fn query_range(container: &ContainerClient, range: FeedRange) -> Result<Vec<Item>, u16> {
    let pages = container.query_items(Query::from(ALL), FeedScope::range(range), None).await;
    let rows: Result<Vec<Item>, _> = pages.map_err(|error| status(&error))?.try_collect().await;
    rows.map_err(|error| status(&error))
}

#[tokio::test]
async fn a_query_can_read_whole_partitions() {
    let (_account, container) = account_with(4).await;
    let ranges = container.read_feed_ranges(None).await.unwrap();
    assert_eq!(ranges.len(), 4);
    let mut rows = 0;
    for range in ranges {
        rows += query_range(&container, range).await.unwrap().len();
    }
    assert_eq!(rows, 40);
    assert_eq!(query(&container, ALL).await.len(), 40);
}

#[tokio::test]
async fn a_query_of_a_part_of_a_partition_is_refused_as_by_the_gateway() {
    let (account, container) = account_with(1).await;
    let account_of_four = account_with(4).await;
    let quarters = account_of_four.1.read_feed_ranges(None).await.unwrap();
    assert_eq!(query_range(&container, quarters[1].clone()).await, Err(400));
    assert!(account.stats().items().failures >= 1);
}

#[tokio::test]
async fn queries_work_right_after_a_split() {
    let (account, container) = account_with(2).await;
    let before = container.read_feed_ranges(None).await.unwrap();
    assert_eq!(query(&container, ALL).await.len(), 40);
    account.split(DATABASE, CONTAINER, 0).await.unwrap();
    assert_eq!(query(&container, ALL).await.len(), 40);
    let mut rows = 0;
    for range in before {
        rows += query_range(&container, range).await.unwrap().len();
    }
    assert_eq!(rows, 40);
}

#[tokio::test]
async fn a_query_in_progress_continues_after_a_split() {
    for text in [ALL, "SELECT * FROM c", "SELECT * FROM c WHERE c[\"value\"] >= 0"] {
        let (account, container) = account_with(2).await;
        account.wire().misbehave(Misbehaviour::SmallPages(NonZeroU32::new(3).unwrap()));
        let pages = container.query_items::<Item>(Query::from(text), FeedScope::full_container(), None).await;
        let mut rows = pages.unwrap();
        let mut seen = Vec::new();
        for partition in [None, Some(0), Some(1), None] {
            for _ in 0..5 {
                seen.push(rows.try_next().await.unwrap().unwrap().value);
            }
            if let Some(partition) = partition {
                account.split(DATABASE, CONTAINER, partition).await.unwrap();
            }
        }
        while let Some(row) = rows.try_next().await.unwrap() {
            seen.push(row.value);
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..40).collect::<Vec<_>>(), "{text}");
    }
}

#[tokio::test]
async fn a_query_of_a_partition_replaced_by_a_merge_is_refused_with_400() {
    let (account, container) = account_with(3).await;
    assert_eq!(query(&container, ALL).await.len(), 40);
    let merged = account.merge(DATABASE, CONTAINER, 0, 1).await.unwrap();
    assert_eq!(account.partitions(DATABASE, CONTAINER).len(), 2);
    assert!(account.partitions(DATABASE, CONTAINER).contains(&merged));

    let pages = container.query_items::<Item>(Query::from(ALL), FeedScope::full_container(), None).await;
    let refused = pages.unwrap().try_collect::<Vec<_>>().await;
    assert_eq!(status(&refused.unwrap_err()), 400);
    // Reads and writes of items work as before, and a new client sees the new partitions.
    for n in 0..40 {
        let pk = format!("pk{n}");
        assert!(read(&container, &pk, "1").await.is_some());
        let batch = TransactionalBatch::new(pk.clone()).upsert_item(item(&pk, "1", n), None).unwrap();
        container.execute_transactional_batch(batch, None).await.unwrap();
    }
    let fresh = open_container(&account.client_named("fresh").await).await;
    assert_eq!(query(&fresh, ALL).await.len(), 40);
    // The old client sees them after it has refreshed its partition map.
    let look_up = ReadFeedRangesOptions::default().with_force_refresh(true);
    container.read_feed_ranges(Some(look_up)).await.unwrap();
    assert_eq!(query(&container, ALL).await.len(), 40);
}

#[tokio::test]
async fn only_adjacent_partitions_can_be_merged() {
    let (account, container) = account_with(3).await;
    assert!(account.merge(DATABASE, CONTAINER, 0, 2).await.is_err());
    assert_eq!(account.partitions(DATABASE, CONTAINER), [0, 1, 2]);
    assert_eq!(query(&container, ALL).await.len(), 40);
}

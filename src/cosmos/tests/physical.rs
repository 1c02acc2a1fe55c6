//! Queries of single physical partitions, which return all rows even after a split.

use super::fixture::{both_ways, cut_short, in_time, note, refuse, Note, StoreFixture, SHORT};
use crate::cosmos::{queries::QueryText, Deadline, OperationKind};
use azure_data_cosmos::feed::FeedRange;
use duroxide_cosmos_emulator::{RequestKind, WireAction};
use std::{
    collections::BTreeSet,
    num::NonZeroU32,
    sync::{Arc, Mutex},
};

both_ways!(
    the_physical_partitions_are_listed_in_order_and_leave_no_gap,
    a_query_of_a_range_asks_only_its_physical_partition,
    a_query_of_a_range_that_was_split_returns_all_rows,
    a_query_of_a_range_that_is_split_between_two_pages_returns_all_rows,
);

const NAME: &str = "duroxide";
const NOTES: QueryText = QueryText::across("notes", 1_000, "SELECT * FROM c WHERE c.type = 'note'");
const BY_TEXT: QueryText =
    QueryText::across("by_text", 100, "SELECT TOP 100 * FROM c WHERE c.type = 'note' ORDER BY c.name");

/// Creates notes in many logical partitions and returns their texts.
async fn many(fixture: &StoreFixture) -> BTreeSet<String> {
    let texts: BTreeSet<String> = (0..40).map(|n| format!("{n:02}")).collect();
    for text in &texts {
        fixture.given(&note(&format!("instance {text}"), "n", text)).await;
    }
    texts
}

async fn ask(fixture: &StoreFixture, range: &FeedRange, text: QueryText, page: u32) -> Vec<String> {
    let statement = text.statement().in_pages_of(NonZeroU32::new(page).unwrap());
    let mut pages = fixture.store.range_pages::<Note>(range, statement, in_time()).unwrap();
    let mut found = Vec::new();
    while let Some(page) = pages.next().await.unwrap() {
        found.extend(page.readable().into_iter().map(|note| note.text));
    }
    found
}

async fn the_physical_partitions_are_listed_in_order_and_leave_no_gap(fixture: StoreFixture) {
    let ranges = fixture.store.physical_partitions(in_time()).await.unwrap();
    assert_eq!(ranges.len(), 4);
    let whole = FeedRange::full();
    assert_eq!(ranges[0].min_inclusive(), whole.min_inclusive());
    assert_eq!(ranges[3].max_exclusive(), whole.max_exclusive());
    assert!(ranges.windows(2).all(|pair| pair[0].max_exclusive() == pair[1].min_inclusive()));
    // The SDK has the list, so this takes no request.
    fixture.account.reset_stats();
    assert_eq!(fixture.store.physical_partitions(in_time()).await.unwrap(), ranges);
    assert_eq!(fixture.account.stats().total().requests, 0);
}

async fn a_query_of_a_range_asks_only_its_physical_partition(fixture: StoreFixture) {
    let mut wanted = many(&fixture).await;
    for range in fixture.store.physical_partitions(in_time()).await.unwrap() {
        fixture.account.reset_stats();
        let found = ask(&fixture, &range, BY_TEXT, 100).await;
        assert!(found.is_sorted() && !found.is_empty(), "{found:?}");
        assert!(found.iter().all(|text| wanted.remove(text)), "each is in one of them");
        assert_eq!(fixture.account.stats().total().requests, 1);
    }
    assert!(wanted.is_empty(), "{wanted:?}");
    let counted = fixture.store.statistics();
    assert_eq!(counted.of(OperationKind::ContainerQuery).requests, 4);
    assert_eq!(counted.of(OperationKind::PartitionQuery).requests, 0);
}

/// The texts of the notes in a range.
async fn contents(fixture: &StoreFixture, range: &FeedRange) -> BTreeSet<String> {
    ask(fixture, range, NOTES, 100).await.into_iter().collect()
}

async fn split_all(fixture: &StoreFixture) {
    for partition in fixture.account.partitions(NAME, NAME) {
        fixture.account.split(NAME, NAME, partition).await.unwrap();
    }
}

async fn a_query_of_a_range_that_was_split_returns_all_rows(fixture: StoreFixture) {
    many(&fixture).await;
    let ranges = fixture.store.physical_partitions(in_time()).await.unwrap();
    let mut before = Vec::new();
    for range in &ranges {
        before.push(contents(&fixture, range).await);
    }
    split_all(&fixture).await;
    let windows = windows(&fixture);
    for text in [NOTES, BY_TEXT] {
        for (range, wanted) in ranges.iter().zip(&before) {
            let found = ask(&fixture, range, text, 100).await;
            assert_eq!(found.len(), wanted.len(), "none twice: {found:?}");
            assert_eq!(&found.into_iter().collect::<BTreeSet<_>>(), wanted);
        }
    }
    assert_eq!(*windows.lock().unwrap(), 0, "whole partitions only");
    // The SDK has the new list from now on.
    assert_eq!(fixture.store.physical_partitions(in_time()).await.unwrap().len(), 8);
}

/// The number of requests for a part of a physical partition, which the gateway refuses.
fn windows(fixture: &StoreFixture) -> Arc<Mutex<usize>> {
    let windows = Arc::new(Mutex::new(0));
    let counted = windows.clone();
    fixture.account.wire().observe(move |request, answer| {
        let is_window = request.header("x-ms-start-epk").is_some() || request.header("x-ms-end-epk").is_some();
        *counted.lock().unwrap() += usize::from(is_window && answer.status < 300);
    });
    windows
}

async fn a_query_of_a_range_that_is_split_between_two_pages_returns_all_rows(fixture: StoreFixture) {
    many(&fixture).await;
    let range = fixture.store.physical_partitions(in_time()).await.unwrap().remove(0);
    let wanted = contents(&fixture, &range).await;
    assert!(wanted.len() > 4);
    let statement = NOTES.statement().in_pages_of(NonZeroU32::new(2).unwrap());
    let mut pages = fixture.store.range_pages::<Note>(&range, statement, in_time()).unwrap();
    let mut found: Vec<Note> = pages.next().await.unwrap().unwrap().readable();
    split_all(&fixture).await;
    while let Some(page) = pages.next().await.unwrap() {
        found.extend(page.readable());
    }
    assert_eq!(found.len(), wanted.len());
    assert_eq!(found.into_iter().map(|note| note.text).collect::<BTreeSet<_>>(), wanted);
}

#[tokio::test]
async fn failures_while_the_list_is_fetched_again_are_retried() {
    for action in [refuse(429), refuse(503), WireAction::FailConnection, WireAction::LoseAnswer] {
        let fixture = StoreFixture::in_process().await;
        let wanted = many(&fixture).await;
        let known = fixture.store.physical_partitions(in_time()).await.unwrap();
        split_all(&fixture).await;
        let rule = fixture.on(RequestKind::PartitionKeyRanges, action.clone());
        let mut pages =
            fixture.store.range_pages::<Note>(&known[0], NOTES.statement(), Deadline::after(SHORT)).unwrap();
        let error = cut_short(pages.next()).await.unwrap_err();
        assert!(error.is_retryable(), "{action:?}: {error:?}");
        assert!(rule.hits() > 0);
        // Depending on its progress, the SDK may still have the old list.
        match cut_short(fixture.store.physical_partitions(Deadline::after(SHORT))).await {
            Ok(listed) => assert_eq!(listed, known),
            Err(error) => assert!(error.is_retryable() && error.to_string().contains("physical partitions"), "{error}"),
        }

        let recovers = async {
            tokio::time::sleep(SHORT).await;
            rule.remove();
        };
        let (listed, ()) = tokio::join!(fixture.store.physical_partitions(in_time()), recovers);
        assert!([4, 8].contains(&listed.unwrap().len()));
        let mut found = BTreeSet::new();
        for range in &known {
            found.extend(contents(&fixture, range).await);
        }
        assert_eq!(found, wanted);
        assert_eq!(fixture.store.physical_partitions(in_time()).await.unwrap().len(), 8);
    }
}

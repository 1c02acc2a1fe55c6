//! Accounts with several regions, and with weaker consistency. The write region answers authoritative reads, and
//! session reads see the writes of this process.

use super::fixture::{config, done, in_time, note, refuse, Note, CLIENT};
use crate::cosmos::{bootstrap, queries::QueryText, Freshness, OperationKind, Store, StoreError};
use azure_data_cosmos::{options::Region, CosmosClient, CosmosClientBuilder, RoutingStrategy};
use duroxide_cosmos_emulator::{
    ConsistencyLevel, LocalAccount, LocalAccountBuilder, RequestKind, WireAction, WireRule, WriteMode,
};

const HOME: &str = "East US";
const AWAY: &str = "West US";
const NOTES: QueryText = QueryText::across("notes", 1_000, "SELECT * FROM c WHERE c.type = 'note'");

fn two_regions() -> LocalAccountBuilder {
    LocalAccount::builder().with_regions(&[HOME, AWAY])
}

/// A client that reads in the region that is not the write region.
async fn client_away(account: &LocalAccount, name: &str) -> CosmosClient {
    let runtime = account.runtime_builder(name).build().await.unwrap();
    let regions = vec![Region::new(AWAY), Region::new(HOME)];
    let builder = CosmosClientBuilder::new().with_runtime(runtime);
    builder.build(account.reference(), RoutingStrategy::PreferredRegions(regions)).await.unwrap()
}

async fn store_away(account: &LocalAccount) -> Store {
    bootstrap::open(&client_away(account, CLIENT).await, &config(account), None).await.unwrap()
}

/// An account whose other region gets no more replication, and a store that reads there.
async fn lagging(builder: LocalAccountBuilder) -> (LocalAccount, Store) {
    let account = builder.build();
    let store = store_away(&account).await;
    account.store().pause_replication(AWAY);
    account.reset_stats();
    (account, store)
}

#[tokio::test]
async fn an_authoritative_read_is_answered_by_the_write_region() {
    let (account, store) = lagging(two_regions()).await;
    let writer = bootstrap::open(&account.client_named("writer").await, &config(&account), None).await.unwrap();
    let note = note("i", "a", "first");
    let read = || store.read::<Note>(&note.instance_id, &note.id, Freshness::Authoritative, in_time());
    assert!(read().await.unwrap().is_none());

    let created = done(writer.create(&note.instance_id, &note.id, &note, in_time()).await);
    let found = read().await.unwrap().expect("it is there");
    assert_eq!((found.document, &found.etag), (note.clone(), &created));

    let second = note.with_text("second");
    let replaced = done(writer.replace(&note.instance_id, &note.id, &second, Some(&found.etag), in_time()).await);
    let found = read().await.unwrap().expect("it is there");
    assert_eq!((found.document, &found.etag), (second, &replaced));

    done(writer.delete(&note.instance_id, &note.id, Some(&found.etag), in_time()).await);
    assert!(read().await.unwrap().is_none());
}

#[tokio::test]
async fn an_authoritative_read_is_counted_as_a_read_and_its_etag_is_the_documents() {
    let (account, store) = lagging(two_regions()).await;
    let note = note("i", "a", "text");
    let etag = done(store.create(&note.instance_id, &note.id, &note, in_time()).await);
    let decided = store.read::<Note>(&note.instance_id, &note.id, Freshness::Authoritative, in_time()).await.unwrap();
    assert_eq!(decided.unwrap().etag, etag);
    account.store().resume_replication(AWAY);
    let looked = store.read::<Note>(&note.instance_id, &note.id, Freshness::Session, in_time()).await.unwrap();
    assert_eq!(looked.unwrap().etag, etag);
    let statistics = store.statistics();
    assert_eq!((statistics.of(OperationKind::Read).requests, statistics.of(OperationKind::Batch).requests), (2, 0));
    let seen = account.stats_of(CLIENT);
    assert_eq!((seen.of(RequestKind::Read).requests, seen.of(RequestKind::Batch).requests), (2, 0));
}

#[tokio::test]
async fn throttling_inside_the_answer_of_an_authoritative_read_is_retried() {
    let (account, store) = lagging(two_regions()).await;
    let note = note("i", "a", "text");
    done(store.create(&note.instance_id, &note.id, &note, in_time()).await);
    for action in [
        WireAction::RefuseBatchOperation { index: 0, status: 429, substatus: None },
        WireAction::RefuseBatchOperation { index: 0, status: 449, substatus: None },
        refuse(429),
        WireAction::LoseAnswer,
    ] {
        let rule = account.wire().add(WireRule::new(action).on(RequestKind::Read).times(3));
        let found = store.read::<Note>(&note.instance_id, &note.id, Freshness::Authoritative, in_time()).await;
        assert_eq!(found.unwrap().unwrap().document, note);
        assert_eq!(rule.hits(), 3);
    }
    assert!(store.statistics().of(OperationKind::Read).retried >= 6);
}

/// A process must see its own writes at any consistency level, in a region that does not have them yet.
async fn sees_its_own_writes(consistency: ConsistencyLevel) {
    let (_account, store) = lagging(two_regions().with_consistency(consistency)).await;
    let note = note("i", "a", "first");
    let etag = done(store.create(&note.instance_id, &note.id, &note, in_time()).await);
    let read = || store.read::<Note>(&note.instance_id, &note.id, Freshness::Session, in_time());
    assert_eq!(read().await.unwrap().expect("its own write").document, note);
    let second = note.with_text("second");
    done(store.replace(&note.instance_id, &note.id, &second, Some(&etag), in_time()).await);
    assert_eq!(read().await.unwrap().expect("its own write").document, second);
    let asked: Vec<Note> = store.query_partition(&note.instance_id, NOTES.statement(), in_time()).await.unwrap();
    assert_eq!(asked, std::slice::from_ref(&second));
    let asked: Vec<Note> = store.query_container(NOTES.statement(), in_time()).await.unwrap().readable();
    assert_eq!(asked, [second]);
}

#[tokio::test]
async fn a_process_sees_its_own_writes_on_an_account_of_session_consistency() {
    sees_its_own_writes(ConsistencyLevel::Session).await;
}

#[tokio::test]
async fn a_process_sees_its_own_writes_on_an_account_of_eventual_consistency() {
    sees_its_own_writes(ConsistencyLevel::Eventual).await;
}

#[tokio::test]
async fn a_process_sees_its_own_writes_on_an_account_of_consistent_prefix() {
    sees_its_own_writes(ConsistencyLevel::ConsistentPrefix).await;
}

#[tokio::test]
async fn an_account_that_accepts_writes_in_several_regions_does_not_fit() {
    let account = two_regions().with_write_mode(WriteMode::Multi).build();
    for client in [account.client_named("near").await, client_away(&account, "away").await] {
        let error = bootstrap::open(&client, &config(&account), None).await.err().expect("it is refused");
        assert!(matches!(&error, StoreError::Unfit { .. }), "{error:?}");
        let text = error.to_string();
        for part in [HOME, AWAY, "several regions", "az cosmosdb update", "--enable-multiple-write-locations false"] {
            assert!(text.contains(part), "{part} is not in: {text}");
        }
    }
}

#[tokio::test]
async fn an_account_with_one_write_region_fits_from_any_region() {
    let account = two_regions().build();
    for client in [account.client_named("near").await, client_away(&account, "away").await] {
        bootstrap::open(&client, &config(&account), None).await.expect("one write region");
    }
}

#[tokio::test]
async fn a_running_failover_does_not_count_as_several_write_regions() {
    let account = two_regions().build();
    bootstrap::open(&account.client_named("maker").await, &config(&account), None).await.unwrap();
    let store = account.store();
    let steps: [&dyn Fn(); 3] =
        [&|| store.announce_failover(AWAY).unwrap(), &|| store.begin_failover(AWAY).unwrap(), &|| {
            store.complete_failover()
        }];
    for (number, step) in steps.iter().enumerate() {
        step();
        let client = account.client_named(&format!("opener-{number}")).await;
        bootstrap::open(&client, &config(&account), None).await.expect("one write region at any time");
    }
}

#[tokio::test]
async fn the_write_region_answers_an_authoritative_query_but_not_every_quorum_read() {
    let (account, store) = lagging(two_regions()).await;
    let writer = bootstrap::open(&account.client_named("writer").await, &config(&account), None).await.unwrap();
    let note = note("i", "a", "first");
    done(writer.create(&note.instance_id, &note.id, &note, in_time()).await);
    let within = |statement| store.query_partition::<Note>(&note.instance_id, statement, in_time());
    let across = |statement| store.query_container::<Note>(statement, in_time());
    // A quorum read in the region that answers, which does not have the note yet.
    assert!(within(NOTES.statement().latest_committed()).await.unwrap().is_empty());
    assert!(across(NOTES.statement().latest_committed()).await.unwrap().is_empty());
    assert_eq!(within(NOTES.statement().authoritative()).await.unwrap(), std::slice::from_ref(&note));
    assert_eq!(across(NOTES.statement().authoritative()).await.unwrap().readable(), std::slice::from_ref(&note));
    // The query excludes the other region now, so it takes one request.
    account.reset_stats();
    assert_eq!(within(NOTES.statement().authoritative()).await.unwrap(), std::slice::from_ref(&note));
    assert_eq!(account.stats_of(CLIENT).of(RequestKind::Query).requests, 1);
}

#[tokio::test]
async fn an_authoritative_query_follows_the_write_region() {
    let (account, store) = lagging(two_regions()).await;
    let note = note("i", "a", "first");
    done(store.create(&note.instance_id, &note.id, &note, in_time()).await);
    let decide = || store.query_partition::<Note>(&note.instance_id, NOTES.statement().authoritative(), in_time());
    assert_eq!(decide().await.unwrap(), std::slice::from_ref(&note));
    account.store().resume_replication(AWAY);
    account.store().set_write_region(AWAY).unwrap();
    let second = note.with_text("second");
    done(store.replace(&note.instance_id, &note.id, &second, None, in_time()).await);
    assert_eq!(decide().await.unwrap(), [second]);
}

#[tokio::test]
async fn an_authoritative_query_follows_the_write_region_even_if_this_process_has_not_written_since() {
    let account = two_regions().build();
    let store = bootstrap::open(&account.client_named(CLIENT).await, &config(&account), None).await.unwrap();
    let first = note("i", "a", "first");
    done(store.create(&first.instance_id, &first.id, &first, in_time()).await);
    let decide = || store.query_partition::<Note>(&first.instance_id, NOTES.statement().authoritative(), in_time());
    assert_eq!(decide().await.unwrap(), std::slice::from_ref(&first));
    // The account fails over a while later, and the former write region gets no more replication.
    tokio::time::pause();
    tokio::time::advance(std::time::Duration::from_secs(60)).await;
    tokio::time::resume();
    account.store().set_write_region(AWAY).unwrap();
    account.store().pause_replication(HOME);
    let writer = bootstrap::open(&client_away(&account, "writer").await, &config(&account), None).await.unwrap();
    let second = first.with_text("second");
    done(writer.replace(&first.instance_id, &first.id, &second, None, in_time()).await);
    assert_eq!(decide().await.unwrap(), [second]);
}

#[tokio::test]
async fn an_authoritative_query_returns_each_row_once_when_the_write_region_moves_between_its_pages() {
    let (account, store) = lagging(two_regions()).await;
    account.store().resume_replication(AWAY);
    let notes: Vec<Note> = (0..9).map(|n| note("i", &n.to_string(), n.to_string())).collect();
    for note in &notes {
        done(store.create(&note.instance_id, &note.id, note, in_time()).await);
    }
    for across in [false, true] {
        account.store().set_write_region(HOME).unwrap();
        done(store.replace(&notes[0].instance_id, &notes[0].id, &notes[0], None, in_time()).await);
        let statement = NOTES.statement().authoritative().in_pages_of(std::num::NonZeroU32::new(2).unwrap());
        let mut pages = match across {
            true => store.container_pages::<Note>(statement, in_time()).unwrap(),
            false => store.partition_pages::<Note>(&notes[0].instance_id, statement, in_time()).unwrap(),
        };
        let mut found = pages.next().await.unwrap().unwrap();
        account.store().set_write_region(AWAY).unwrap();
        done(store.replace(&notes[0].instance_id, &notes[0].id, &notes[0], None, in_time()).await);
        while let Some(page) = pages.next().await.unwrap() {
            found.extend(page);
        }
        let mut texts: Vec<String> = found.readable().into_iter().map(|note| note.text).collect();
        texts.sort();
        assert_eq!(texts, (0..9).map(|n| n.to_string()).collect::<Vec<_>>(), "across: {across}");
    }
}

#[tokio::test]
async fn an_authoritative_query_goes_to_the_write_region_even_if_only_another_one_is_preferred() {
    let account = two_regions().build();
    let runtime = account.runtime_builder(CLIENT).build().await.unwrap();
    let only = RoutingStrategy::PreferredRegions(vec![Region::new(AWAY)]);
    let client = CosmosClientBuilder::new().with_runtime(runtime).build(account.reference(), only).await.unwrap();
    let store = bootstrap::open(&client, &config(&account), None).await.unwrap();
    account.store().pause_replication(AWAY);
    let note = note("i", "a", "first");
    done(store.create(&note.instance_id, &note.id, &note, in_time()).await);
    let decide = || store.query_partition::<Note>(&note.instance_id, NOTES.statement().authoritative(), in_time());
    assert_eq!(decide().await.unwrap(), std::slice::from_ref(&note));
}

#[tokio::test]
async fn a_query_whose_session_token_no_region_can_serve_is_answered_without_it() {
    let account = two_regions().build();
    let store = bootstrap::open(&account.client_named(CLIENT).await, &config(&account), None).await.unwrap();
    let note = note("i", "a", "first");
    done(store.create(&note.instance_id, &note.id, &note, in_time()).await);
    let unavailable = WireAction::Refuse { status: 404, substatus: Some(1002), retry_after: None };
    let by_token = WireRule::new(unavailable).client(CLIENT).on(RequestKind::Query);
    let refused = account.wire().add(by_token.matching(|request| request.header("x-ms-session-token").is_some()));
    let found: Vec<Note> = store.query_container(NOTES.statement(), in_time()).await.unwrap().readable();
    assert_eq!(found, std::slice::from_ref(&note));
    assert!(refused.hits() > 0);
}

#[tokio::test]
async fn a_read_whose_session_token_no_region_can_serve_is_answered_by_the_write_region() {
    let (account, store) = lagging(two_regions()).await;
    let note = note("i", "a", "first");
    done(store.create(&note.instance_id, &note.id, &note, in_time()).await);
    let unavailable = WireAction::Refuse { status: 404, substatus: Some(1002), retry_after: None };
    // A batch of one read is a POST, and counts as a read.
    let by_token = WireRule::new(unavailable).client(CLIENT).on(RequestKind::Read);
    let refused = account.wire().add(by_token.matching(|request| request.method == "GET"));
    let found = store.read::<Note>(&note.instance_id, &note.id, Freshness::Session, in_time()).await.unwrap();
    assert_eq!(found.map(|found| found.document), Some(note));
    assert!(refused.hits() > 0);
}

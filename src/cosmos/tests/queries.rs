//! Queries: they return every matching row once, from any number of pages and partitions.

use super::fixture::{both_ways, in_time, note, refuse, Note, StoreFixture, CLIENT};
use crate::{
    cosmos::{queries, queries::QueryText, Deadline, OperationKind, QueryTimeout, Statement, StoreError},
    model::Partition,
};
use azure_core::http::StatusCode;
use azure_data_cosmos::fault_injection::{
    CustomResponseBuilder, FaultInjectionConditionBuilder, FaultInjectionResult, FaultInjectionResultBuilder,
    FaultInjectionRule, FaultInjectionRuleBuilder, FaultOperationType,
};
use duroxide_cosmos_emulator::{sql, RequestKind, WireAction, WireRule, WireRuleHandle};
use serde_json::{json, Value};
use std::{
    collections::BTreeSet,
    num::NonZeroU32,
    sync::{Arc, Mutex},
    time::Duration,
};

both_ways!(
    a_query_in_a_partition_sees_that_partition_only,
    a_query_across_partitions_asks_all_of_them,
    an_order_by_across_partitions_is_merged,
    a_query_that_matches_nothing_is_empty,
    parameters_are_bound_and_never_spliced_in,
    only_a_refused_page_is_requested_again,
    a_query_across_partitions_continues_at_the_refused_page,
    a_caller_can_stop_after_any_page,
    the_pages_end_once_and_stay_ended,
    a_query_that_makes_progress_may_outlast_the_time_of_one_page,
);

const NOTES: QueryText = QueryText::across("notes", 1_000, "SELECT * FROM c WHERE c.type = 'note'");
const BY_TEXT: QueryText =
    QueryText::across("by_text", 1_000, "SELECT * FROM c WHERE c.name IN (@texts) ORDER BY c.name");

/// Creates twenty notes in twenty partitions and returns their texts.
async fn twenty(fixture: &StoreFixture) -> BTreeSet<String> {
    let texts = (0..20).map(|n| format!("{n:02}"));
    let notes: Vec<Note> = texts.map(|text| note(&format!("instance {text}"), "n", text)).collect();
    for note in &notes {
        fixture.given(note).await;
    }
    notes.into_iter().map(|note| note.text).collect()
}

fn texts(notes: Vec<Note>) -> Vec<String> {
    notes.into_iter().map(|note| note.text).collect()
}

async fn a_query_in_a_partition_sees_that_partition_only(fixture: StoreFixture) {
    let (here, there) = (note("i", "a", "here"), note("j", "a", "there"));
    fixture.given(&here).await;
    fixture.given(&there).await;
    let found: Vec<Note> =
        fixture.store.query_partition(&here.instance_id, NOTES.statement(), in_time()).await.unwrap();
    assert_eq!(found, [here]);
    assert_eq!(fixture.account.stats().of(RequestKind::Query).requests, 1);
}

async fn a_query_across_partitions_asks_all_of_them(fixture: StoreFixture) {
    let wanted = twenty(&fixture).await;
    let found: Vec<Note> = fixture.store.query_container(NOTES.statement(), in_time()).await.unwrap().readable();
    let found = texts(found);
    assert_eq!(found.len(), wanted.len());
    assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), wanted);
    assert_eq!(fixture.account.stats().of(RequestKind::Query).requests, 4);
}

async fn an_order_by_across_partitions_is_merged(fixture: StoreFixture) {
    let wanted: Vec<String> = twenty(&fixture).await.into_iter().collect();
    let statement = BY_TEXT.statement().bind_list("@texts", &wanted);
    let found: Vec<Note> = fixture.store.query_container(statement, in_time()).await.unwrap().readable();
    assert_eq!(texts(found), wanted);
}

async fn a_query_that_matches_nothing_is_empty(fixture: StoreFixture) {
    let elsewhere = note("i", "a", "").instance_id;
    let in_partition: Vec<Note> =
        fixture.store.query_partition(&elsewhere, NOTES.statement(), in_time()).await.unwrap();
    let anywhere: Vec<Note> = fixture.store.query_container(NOTES.statement(), in_time()).await.unwrap().readable();
    assert!(in_partition.is_empty() && anywhere.is_empty());
}

async fn parameters_are_bound_and_never_spliced_in(fixture: StoreFixture) {
    let awkward = "' OR true OR c.name = '\"\\";
    fixture.given(&note("i", "a", awkward)).await;
    fixture.given(&note("i", "b", "other")).await;
    let statement = BY_TEXT.statement().bind_list("@texts", [awkward]);
    let found: Vec<Note> = fixture.store.query_container(statement, in_time()).await.unwrap().readable();
    assert_eq!(texts(found), [awkward]);
}

fn on_queries(id: &str, times: u32, result: FaultInjectionResult) -> Arc<FaultInjectionRule> {
    let condition = FaultInjectionConditionBuilder::new().with_operation_type(FaultOperationType::QueryItem).build();
    let rule = FaultInjectionRuleBuilder::new(id, result).with_condition(condition).with_hit_limit(times);
    Arc::new(rule.build())
}

/// A page of a query, with or without another page after it.
fn page(id: &str, notes: &[Note], more: bool) -> Arc<FaultInjectionRule> {
    let body = json!({ "_rid": "rid", "Documents": notes, "_count": notes.len() });
    let mut response = CustomResponseBuilder::new(StatusCode::Ok)
        .with_header("x-ms-request-charge", "1.5")
        .with_body(body.to_string());
    if more {
        response = response.with_header("x-ms-continuation", "more");
    }
    on_queries(id, 1, FaultInjectionResultBuilder::new().with_custom_response(response.build()).build())
}

#[tokio::test]
async fn a_query_of_several_pages_returns_all_of_them() {
    let notes = ["1", "2", "3", "4"].map(|name| note("i", name, name));
    let rules = vec![page("1", &notes[..2], true), page("2", &[], true), page("3", &notes[2..], false)];
    let fixture = StoreFixture::with_rules(rules.clone()).await;
    let partition = &notes[0].instance_id;
    let found: Vec<Note> = fixture.store.query_partition(partition, NOTES.statement(), in_time()).await.unwrap();
    assert_eq!(found, notes);
    assert!(rules.iter().all(|rule| rule.hit_count() == 1));
}

/// Creates twenty notes in one partition and returns their texts.
async fn five_pages(fixture: &StoreFixture) -> (Partition, Vec<String>) {
    let notes: Vec<Note> = (0..20).map(|n| note("i", &format!("{n:02}"), format!("{n:02}"))).collect();
    for note in &notes {
        fixture.given(note).await;
    }
    (notes[0].instance_id.clone(), texts(notes))
}

fn by_four(text: QueryText) -> Statement {
    text.statement().in_pages_of(NonZeroU32::new(4).unwrap())
}

/// Refuses pages after the first `passing` pages, `times` times.
fn refuse_pages(fixture: &StoreFixture, passing: u64, times: u64, status: u16) -> WireRuleHandle {
    let rule = WireRule::new(refuse(status)).on(RequestKind::Query).client(CLIENT).skip(passing).times(times);
    fixture.account.wire().add(rule)
}

async fn only_a_refused_page_is_requested_again(fixture: StoreFixture) {
    let (partition, wanted) = five_pages(&fixture).await;
    for (status, ordered) in [(429, false), (503, false), (429, true), (503, true)] {
        fixture.account.reset_stats();
        let refused = refuse_pages(&fixture, 4, 7, status);
        let statement = if ordered { by_four(BY_TEXT).bind_list("@texts", &wanted) } else { by_four(NOTES) };
        let found: Vec<Note> = fixture.store.query_partition(&partition, statement, in_time()).await.unwrap();
        let mut found = texts(found);
        if !ordered {
            found.sort();
        }
        assert_eq!(found, wanted);
        assert_eq!(refused.hits(), 7);
        assert_eq!(fixture.account.stats().of(RequestKind::Query).requests, 5 + 7, "{status}");
        let counted = fixture.store.statistics().of(OperationKind::PartitionQuery);
        assert!(counted.retried >= 1);
        refused.remove();
    }
}

async fn a_query_across_partitions_continues_at_the_refused_page(fixture: StoreFixture) {
    let wanted: Vec<String> = twenty(&fixture).await.into_iter().collect();
    for statement in [by_four(NOTES), by_four(BY_TEXT).bind_list("@texts", &wanted)] {
        for passing in 0..4 {
            let refused = refuse_pages(&fixture, passing, 3, 429);
            let mut found =
                texts(fixture.store.query_container(statement.clone(), in_time()).await.unwrap().readable());
            found.sort();
            assert_eq!(found, wanted, "after {passing}");
            assert_eq!(refused.hits(), 3);
            refused.remove();
        }
    }
}

async fn a_caller_can_stop_after_any_page(fixture: StoreFixture) {
    five_pages(&fixture).await;
    fixture.account.reset_stats();
    let mut pages = fixture.store.container_pages::<Note>(by_four(NOTES), in_time()).unwrap();
    assert_eq!(fixture.account.stats().of(RequestKind::Query).requests, 0);
    let mut taken = 0;
    while taken < 8 {
        taken += pages.next().await.unwrap().expect("more pages").len();
    }
    drop(pages);
    // All notes are in one of the four partitions. The SDK asks the partitions one after the other.
    let requests = fixture.account.stats().of(RequestKind::Query).requests;
    assert!(requests <= 5, "{requests} requests for two pages of five");
}

async fn the_pages_end_once_and_stay_ended(fixture: StoreFixture) {
    let (_, wanted) = five_pages(&fixture).await;
    let mut pages = fixture.store.container_pages::<Note>(by_four(NOTES), in_time()).unwrap();
    let mut found = Vec::new();
    while let Some(page) = pages.next().await.unwrap() {
        found.extend(texts(page.readable()));
    }
    found.sort();
    assert_eq!(found, wanted);
    assert!(pages.next().await.unwrap().is_none());
}

async fn a_query_that_makes_progress_may_outlast_the_time_of_one_page(fixture: StoreFixture) {
    let (partition, wanted) = five_pages(&fixture).await;
    let (slow, time) = (Duration::from_millis(250), Duration::from_millis(600));
    let delay = fixture.on(RequestKind::Query, WireAction::Delay(slow));
    // Five pages take longer than the time limit of one page.
    let found: Vec<Note> =
        fixture.store.query_partition(&partition, by_four(NOTES), QueryTimeout::PerPage(time)).await.unwrap();
    assert_eq!(found.len(), wanted.len());
    let begun = delay.hits();
    let error =
        fixture.store.query_partition::<Note>(&partition, by_four(NOTES), Deadline::after(time)).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error:?}");
    assert!(delay.hits() - begun < 5);
}

/// The SDK plans queries and rewrites those with an order. The rewritten texts must be valid, too.
#[tokio::test]
async fn every_text_that_reaches_the_wire_is_in_the_published_grammar() {
    let fixture = StoreFixture::in_process().await;
    let sent = Arc::new(Mutex::new(BTreeSet::new()));
    let seen = sent.clone();
    fixture.account.wire().observe(move |request, _| {
        let text = request.json().and_then(|body| body["query"].as_str().map(str::to_owned));
        seen.lock().unwrap().extend(text.filter(|_| request.kind == RequestKind::Query));
    });
    let partition = note("i", "a", "").instance_id;
    for query in queries::ALL {
        if query.is_across() {
            fixture.store.query_container::<Value>(query.sample(), in_time()).await.unwrap();
        } else {
            fixture.store.query_partition::<Value>(&partition, query.sample(), in_time()).await.unwrap();
        }
    }
    let sent = sent.lock().unwrap();
    let rewritten = sent.iter().filter(|text| text.contains("orderByItems")).count();
    let ordered = queries::ALL.iter().filter(|query| query.is_across() && query.text.contains("ORDER BY")).count();
    println!("{} texts on the wire, {rewritten} of them rewritten by the SDK", sent.len());
    assert_eq!((rewritten, sent.len()), (ordered, queries::ALL.len()));
    for text in sent.iter() {
        sql::parse(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    }
}

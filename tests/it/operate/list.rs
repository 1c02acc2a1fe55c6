//! Pages of instances.

use crate::fixture::*;
use duroxide_cosmos::{operate::InstanceQuery, CosmosDBProvider};
use duroxide_cosmos_emulator::RequestKind;
use std::{
    collections::BTreeSet,
    sync::{
        atomic::{AtomicU64, Ordering},
        Arc,
    },
};

async fn all(provider: &CosmosDBProvider, query: &InstanceQuery, limit: usize) -> (Vec<String>, usize) {
    let (mut found, mut cursor, mut pages) = (Vec::new(), None, 0);
    loop {
        let page = provider.instances(query, cursor.as_deref(), limit).await.unwrap();
        assert!(page.instances.len() <= limit);
        found.extend(page.instances.into_iter().map(|instance| instance.id));
        (cursor, pages) = (page.cursor, pages + 1);
        if cursor.is_none() {
            return (found, pages);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_show_every_instance_once_newest_first_even_those_of_one_millisecond() {
    for partitions in [1, 4] {
        let fixture = Fixture::new(partitions);
        let time = Arc::new(AtomicU64::new(1_000_000));
        let maker = fixture.provider_at(&time).await;
        for n in 0..25 {
            // Ten instances per millisecond, twice.
            time.store(1_000_000 + n / 10, Ordering::Relaxed);
            begin(&maker, &format!("i{n}"), Vec::new(), Vec::new()).await;
        }
        let everything = InstanceQuery::default();
        let (found, pages) = all(&maker, &everything, 7).await;
        assert_eq!((found.len(), pages), (25, 4), "{partitions}");
        assert_eq!(found.iter().collect::<BTreeSet<_>>().len(), 25);
        let number = |id: &String| id[1..].parse::<u64>().unwrap() / 10;
        assert!(found.windows(2).all(|pair| number(&pair[0]) >= number(&pair[1])), "newest first: {found:?}");
        // Instances that appear or disappear between two pages do not move the others.
        let page = maker.instances(&everything, None, 7).await.unwrap();
        time.store(1_000_009, Ordering::Relaxed);
        begin(&maker, "new", Vec::new(), Vec::new()).await;
        admin(&maker).delete_instance(&page.instances[3].id, true).await.unwrap();
        let rest = maker.instances(&everything, page.cursor.as_deref(), 1_000).await.unwrap();
        assert_eq!((rest.instances.len(), rest.cursor.is_none()), (18, true));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_page_is_one_query_with_any_filter() {
    let fixture = Fixture::new(1);
    let time = Arc::new(AtomicU64::new(5_000));
    let maker = fixture.provider_at(&time).await;
    begin(&maker, "parent", Vec::new(), vec![start_child("child", Some("parent"))]).await;
    let (_, token, _) = next_turn(&maker, LONG).await;
    let metadata = duroxide::providers::ExecutionMetadata {
        parent_instance_id: Some("parent".to_owned()),
        orchestration_name: Some("Other".to_owned()),
        ..ended("Failed")
    };
    time.store(9_000, Ordering::Relaxed);
    commit(&maker, &token, vec![started("child", 1)], Vec::new(), Vec::new(), metadata).await.unwrap();
    let ask = |change: fn(&mut InstanceQuery)| {
        let mut query = InstanceQuery::default();
        change(&mut query);
        query
    };
    let questions: [(InstanceQuery, &[&str]); 9] = [
        (ask(|_| ()), &["child", "parent"]),
        (ask(|q| q.status = Some("Failed".into())), &["child"]),
        (ask(|q| q.status = Some("Completed".into())), &[]),
        (ask(|q| q.name = Some("Other".into())), &["child"]),
        (ask(|q| q.parent = Some("parent".into())), &["child"]),
        (ask(|q| q.text = Some("AREN".into())), &["parent"]),
        (ask(|q| q.created_after = Some(9_000)), &["child"]),
        (ask(|q| q.created_before = Some(9_000)), &["parent"]),
        (ask(|q| (q.created_after, q.created_before) = (Some(6_000), Some(9_000))), &[]),
    ];
    for (query, expected) in questions {
        let before = fixture.account.stats().of(RequestKind::Query).requests;
        let page = maker.instances(&query, None, 10).await.unwrap();
        let found: Vec<&str> = page.instances.iter().map(|instance| instance.id.as_str()).collect();
        assert_eq!(found, expected, "{query:?}");
        assert_eq!(fixture.account.stats().of(RequestKind::Query).requests - before, 1, "{query:?}");
    }
    let child = maker.instance("child").await.unwrap().unwrap();
    assert_eq!((child.status.as_str(), child.parent.as_deref()), ("Failed", Some("parent")));
    assert_eq!((child.created_at, child.completed_at), (9_000, Some(9_000)));
    assert!(maker.instance("nobody").await.unwrap().is_none());
    let error = maker.instances(&InstanceQuery::default(), Some("rubbish"), 10).await.unwrap_err();
    assert!(error.to_string().contains("is not a cursor"), "{error}");
}

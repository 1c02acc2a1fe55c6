//! Queries: every text of the provider, paging and order, hash ranges, and queries that the service refuses.

use super::{text, DeepCheck, DeepCheckResult};
use crate::{
    cosmos::queries::{QueryText, ALL},
    cosmos::{StoreError, QUERY_TIME},
    model::Slot,
};
use futures::{stream, StreamExt};
use serde_json::Value;
use std::{num::NonZeroU32, time::Duration};
use tokio::time::Instant;

/// The number of concurrent queries.
const CONCURRENCY: usize = 8;
/// The number of rows of the query of several pages.
const ROWS: u64 = 7;
const PAGE: NonZeroU32 = NonZeroU32::new(3).unwrap();

const PAGED: QueryText = QueryText::across(
    "paged",
    3,
    "SELECT * FROM c WHERE c.type = 'probe' AND c.createdAt >= @from AND c.createdAt < @to ORDER BY c.createdAt DESC",
);
const UNINDEXED: QueryText = QueryText::within("unindexed", "SELECT * FROM c WHERE c.padding = 'none'");
const RESERVED: QueryText = QueryText::within("reserved", "SELECT c.by FROM c");
const QUOTES: QueryText =
    QueryText::within("quotes", "SELECT VALUE c.createdAt FROM c WHERE c.type = \"probe\" AND c.createdAt = @from");

impl DeepCheck<'_> {
    pub(super) async fn queries(&mut self) {
        self.texts().await;
        let outcome = self.pages().await;
        self.report("pages and order", outcome, "polls and lists miss rows, or return them twice");
        let outcome = self.ranges().await;
        self.report("hash ranges", outcome, "workers query partitions that do not hold their work");
        let outcome = self.quotes().await;
        self.report("quotes", outcome, "none for the provider, which uses single quotes: the local account differs");
        let outcome = self.refusals().await;
        self.report(
            "refused queries",
            outcome,
            "none for the provider, which sends neither: the local account differs",
        );
    }

    /// Sends every query of the provider, with parameters of the right types, and reads one page. The page is of one
    /// logical or one physical partition.
    async fn texts(&mut self) {
        // By value, because a check that borrows the queries can't be spawned.
        let this: &Self = self;
        let sending = stream::iter(ALL.iter().copied()).map(|query| async move {
            let begun = Instant::now();
            (query.name, this.send_query(query).await, begun.elapsed())
        });
        let answers: Vec<(&str, Result<(), StoreError>, Duration)> = sending.buffered(CONCURRENCY).collect().await;
        let slowest = answers.iter().map(|(.., time)| *time).max().unwrap_or_default();
        let accepted = answers.iter().filter(|(_, answer, _)| answer.is_ok()).count();
        for (name, answer, _) in answers {
            if let Err(error) = answer {
                let consequence = "the provider can't work on this account";
                self.report(&format!("query {name}"), Err(error.to_string()), consequence);
            }
        }
        let observation =
            format!("{accepted} of {} accepted, the slowest within {} ms", ALL.len(), slowest.as_millis());
        let outcome = if accepted == ALL.len() { Ok(observation) } else { Err(observation) };
        let consequence = format!("see the lines above. The time limit of a page is {QUERY_TIME:?}");
        self.report("query texts", outcome, &consequence);
    }

    async fn send_query(&self, query: QueryText) -> Result<(), StoreError> {
        let statement = query.sample().in_pages_of(PAGE);
        if !query.is_across() {
            let mut pages = self.store.partition_pages::<Value>(&self.partition, statement, self.deadline())?;
            return pages.next().await.map(drop);
        }
        let ranges = self.store.physical_partitions(self.deadline()).await?;
        let Some(range) = ranges.first() else {
            return Err(StoreError::Malformed { detail: "the container has no physical partitions".to_owned() });
        };
        self.store.range_pages::<Value>(range, statement, self.deadline())?.next().await.map(drop)
    }

    /// The rows must arrive in order, each of them once, on pages of any size.
    async fn pages(&self) -> DeepCheckResult {
        for number in 0..ROWS {
            let document = self.document(&format!("page-{number}"), self.first + number, 300);
            self.create(&format!("page-{number}"), &document).await?;
        }
        let statement = PAGED.statement().bind("@from", self.first).bind("@to", self.first + ROWS).authoritative();
        let mut pages = self.store.container_pages::<Value>(statement, self.deadline()).map_err(text)?;
        let (mut found, mut count, mut empty) = (Vec::new(), 0, 0);
        while let Some(page) = pages.next().await.map_err(text)? {
            count += 1;
            empty += usize::from(page.is_empty());
            found.extend(page.readable().iter().filter_map(|row| row["createdAt"].as_u64()));
        }
        let wanted: Vec<u64> = (self.first..self.first + ROWS).rev().collect();
        match found == wanted {
            true => Ok(format!("{ROWS} rows in descending order, in {count} pages, {empty} of them empty")),
            false => Err(format!("{found:?} was returned instead of {wanted:?}")),
        }
    }

    /// The hash that the provider computes from a partition key must select the physical partition of the document.
    async fn ranges(&self) -> DeepCheckResult {
        let ranges = self.store.physical_partitions(self.deadline()).await.map_err(text)?;
        let slot = Slot::of(&self.partition);
        let holds =
            |range: &&azure_data_cosmos::feed::FeedRange| crate::model::SlotRange::of_feed_range(range).contains(slot);
        let Some(range) = ranges.iter().find(holds) else {
            return Err(format!("none of the {} physical partitions holds slot {}", ranges.len(), slot.number()));
        };
        let statement = PAGED.statement().bind("@from", self.first).bind("@to", self.first + ROWS).authoritative();
        let pages = self.store.range_pages::<Value>(range, statement, self.deadline());
        let mut pages = pages.map_err(text)?;
        let (rows, _) = pages.at_least(1).await.map_err(text)?;
        match rows.is_empty() {
            false => Ok(format!("{} physical partitions; documents are in the partition of their hash", ranges.len())),
            true => Err(format!("slot {} is not in the physical partition of its hash", slot.number())),
        }
    }

    async fn quotes(&self) -> DeepCheckResult {
        let statement = QUOTES.statement().bind("@from", self.first).authoritative();
        let rows: Result<Vec<u64>, _> = self.store.query_partition(&self.partition, statement, self.deadline()).await;
        match rows {
            Ok(rows) if rows == [self.first] => Ok("a string may be in double quotes".to_owned()),
            Ok(rows) => Err(format!("a string in double quotes matched {} rows instead of 1", rows.len())),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Sends a reserved word and a filter without an index. The provider itself sends neither.
    async fn refusals(&self) -> DeepCheckResult {
        let reserved = self.answer_to(RESERVED).await?;
        let unindexed = self.answer_to(UNINDEXED).await?;
        let observation = format!("a reserved word is {reserved}; a filter on a path without index is {unindexed}");
        if reserved == REFUSED {
            Ok(observation)
        } else {
            Err(observation)
        }
    }

    async fn answer_to(&self, query: QueryText) -> Result<&'static str, String> {
        let statement = query.statement();
        match self.store.query_partition::<Value>(&self.partition, statement, self.deadline()).await {
            Ok(_) => Ok("accepted"),
            Err(StoreError::Rejected { .. }) => Ok(REFUSED),
            Err(error) => Err(error.to_string()),
        }
    }
}

const REFUSED: &str = "refused with 400";

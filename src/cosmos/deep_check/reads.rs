//! Reads: each consistency, the write region, the priority header.

use super::{text, Deep, DeepCheckResult};
use crate::cosmos::{error::describe, queries::CONTENTS};
use azure_data_cosmos::options::{
    ItemReadOptions, OperationOptions, OperationOptionsBuilder, PriorityLevel, ReadConsistencyStrategy,
    ThroughputControlOptionsBuilder,
};

impl Deep<'_> {
    pub(super) async fn reads(&mut self) {
        if let Err(answer) = self.create("read", &self.document("read", 1, 300)).await {
            return self.note("document to read", Err(answer), "no read can be tried");
        }
        let strategies = [
            ("session reads", ReadConsistencyStrategy::Session, "a worker does not see its own writes"),
            ("eventual reads", ReadConsistencyStrategy::Eventual, "a check for wake-ups costs more, or fails"),
            ("quorum reads", ReadConsistencyStrategy::LatestCommitted, "queries that decide something fail"),
        ];
        for (subject, strategy, follows) in strategies {
            let options = OperationOptionsBuilder::new().with_read_consistency_strategy(strategy).build();
            let outcome = self.read_with(options).await;
            self.note(subject, outcome, follows);
        }
        let control = ThroughputControlOptionsBuilder::new().with_priority_level(PriorityLevel::Low).build();
        let outcome = self.read_with(OperationOptionsBuilder::new().with_throughput_control(control).build()).await;
        self.note("low priority", outcome, "polls fail: they are sent with low priority");
        let outcome = self.authoritative().await;
        self.note("write region", outcome, "decisions are taken on what a lagging region knows");
    }

    async fn read_with(&self, options: OperationOptions) -> DeepCheckResult {
        let options = ItemReadOptions::default().with_operation_options(options);
        let id = self.id("read");
        let read = self.store.inner.container.read_item(&self.partition, id.as_str(), Some(options)).await;
        read.map(|_| "accepted".to_owned()).map_err(|error| describe(&error))
    }

    /// A query that decides something is answered by the region that takes writes.
    async fn authoritative(&self) -> DeepCheckResult {
        let statement = CONTENTS.statement().authoritative();
        let rows: Result<Vec<serde_json::Value>, _> =
            self.store.query_partition(&self.partition, statement, self.deadline()).await;
        let rows = rows.map_err(text)?;
        if rows.is_empty() {
            return Err("an authoritative query did not see a document that was just written".to_owned());
        }
        let region = self.store.inner.regions.write_region().unwrap_or_else(|| "a region without a name".to_owned());
        Ok(format!("queries that decide something are answered by {region}"))
    }
}

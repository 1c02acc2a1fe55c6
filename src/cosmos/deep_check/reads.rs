//! Reads: each consistency level, the write region, and the priority header.

use super::{text, DeepCheck, DeepCheckResult};
use crate::cosmos::{error::describe, queries::CONTENTS};
use azure_data_cosmos::options::{
    ItemReadOptions, OperationOptions, OperationOptionsBuilder, PriorityLevel, ReadConsistencyStrategy,
    ThroughputControlOptionsBuilder,
};

impl DeepCheck<'_> {
    pub(super) async fn reads(&mut self) {
        if let Err(answer) = self.create("read", &self.document("read", 1, 300)).await {
            return self.report("document to read", Err(answer), "the check could not test any read");
        }
        let strategies = [
            ("session reads", ReadConsistencyStrategy::Session, "a worker would not see its own writes"),
            ("eventual reads", ReadConsistencyStrategy::Eventual, "a check for wake-ups would cost more, or fail"),
            ("quorum reads", ReadConsistencyStrategy::LatestCommitted, "authoritative queries would fail"),
        ];
        for (subject, strategy, consequence) in strategies {
            let options = OperationOptionsBuilder::new().with_read_consistency_strategy(strategy).build();
            let outcome = self.read_with(options).await;
            self.report(subject, outcome, consequence);
        }
        let control = ThroughputControlOptionsBuilder::new().with_priority_level(PriorityLevel::Low).build();
        let outcome = self.read_with(OperationOptionsBuilder::new().with_throughput_control(control).build()).await;
        self.report("low priority", outcome, "polls would fail, because they have low priority");
        let outcome = self.authoritative().await;
        self.report("write region", outcome, "the provider would decide by the data of a lagging region");
    }

    async fn read_with(&self, options: OperationOptions) -> DeepCheckResult {
        let options = ItemReadOptions::default().with_operation_options(options);
        let id = self.id("read");
        let read = self.store.inner.container.read_item(&self.partition, id.as_str(), Some(options)).await;
        read.map(|_| "accepted".to_owned()).map_err(|error| describe(&error))
    }

    /// The write region must answer an authoritative query.
    async fn authoritative(&self) -> DeepCheckResult {
        let statement = CONTENTS.statement().authoritative();
        let rows: Result<Vec<serde_json::Value>, _> =
            self.store.query_partition(&self.partition, statement, self.deadline()).await;
        let rows = rows.map_err(text)?;
        if rows.is_empty() {
            return Err("an authoritative query did not see a document that was just written".to_owned());
        }
        let region = self.store.inner.regions.write_region().unwrap_or_else(|| "a region without a name".to_owned());
        Ok(format!("{region} answers authoritative queries"))
    }
}

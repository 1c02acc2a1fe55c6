//! Transactional batches: they are atomic, honour conditions, and return an ETag for each document.

use super::{text, DeepCheck, DeepCheckResult};
use crate::cosmos::{probe, BatchOutcome};
use crate::model::{operation, Operation};
use azure_core::http::Etag;
use serde_json::Value;

impl DeepCheck<'_> {
    pub(super) async fn batches(&mut self) {
        let commit = "every commit of a turn is a batch, so a history could be written in part";
        let outcome = self.probe().await;
        self.report("batch probe", outcome, commit);
        let outcome = self.etags().await;
        self.report("batch ETags", outcome, "a worker could not commit a turn that it claimed with a batch");
        for (subject, status) in [("batch 409", 409), ("batch 412", 412), ("batch 404", 404)] {
            let outcome = self.failure(status).await;
            self.report(subject, outcome, commit);
        }
        let outcome = self.largest().await;
        self.report("largest batch", outcome, "the service would refuse large turns");
    }

    /// The probe of opening: a failed condition rolls the batch back. It uses a document of the check, because the
    /// format document may not exist yet.
    async fn probe(&self) -> DeepCheckResult {
        let document = self.document("existing", 1, 300);
        self.create("existing", &document).await?;
        let existing = (&self.partition, &self.id("existing"), &document);
        match probe::batches_with(self.store, existing, self.deadline()).await {
            Ok(None) => Ok("a batch with a failed condition leaves nothing behind".to_owned()),
            Ok(Some(flaw)) => Err(flaw.describe().to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    async fn send(&self, operations: &[Operation]) -> Result<BatchOutcome, String> {
        self.store.batch(&self.partition, operations, self.deadline()).await.map_err(text)
    }

    /// Creates, replaces, upserts and deletes in one batch. Each ETag in the answer must be that of the stored
    /// document.
    async fn etags(&self) -> DeepCheckResult {
        let first = self.create("etag-1", &self.document("etag-1", 1, 300)).await?;
        self.create("etag-2", &self.document("etag-2", 1, 300)).await?;
        let operations = [
            replace(self.id("etag-1"), &self.document("etag-1", 2, 300), &first)?,
            create(&self.document("etag-3", 1, 300))?,
            Operation::upsert(&self.document("etag-4", 1, 300)).map_err(|e| e.to_string())?,
            Operation::delete(self.id("etag-2"), None),
        ];
        let committed = match self.send(&operations).await? {
            BatchOutcome::Committed(committed) => committed,
            BatchOutcome::RolledBack(back) => {
                return Err(format!("operation {} was answered {}", back.index, back.status))
            }
        };
        for (index, name) in ["etag-1", "etag-3", "etag-4"].into_iter().enumerate() {
            let stored = self.read(name).await?.ok_or_else(|| format!("{name} does not exist after the batch"))?.1;
            match committed.etag(index) {
                Some(etag) if *etag == stored => {}
                other => return Err(format!("operation {index} returned ETag {other:?}, the document has {stored}")),
            }
        }
        match self.read("etag-2").await? {
            None => Ok("create, replace, upsert, delete; each ETag is that of the stored document".to_owned()),
            Some(_) => Err("a document that the batch deleted still exists".to_owned()),
        }
    }

    /// One operation fails with this status. The answer names it, and the service rolls the others back.
    async fn failure(&self, status: u16) -> DeepCheckResult {
        let name = format!("failed-{status}");
        let existing = self.document("failed", 1, 300);
        if self.read("failed").await?.is_none() {
            self.create("failed", &existing).await?;
        }
        let failing = match status {
            409 => create(&existing)?,
            412 => replace(self.id("failed"), &existing, &Etag::from(probe::NO_ETAG))?,
            _ => Operation::delete(self.id("missing"), None),
        };
        let operations = [create(&self.document(&name, 1, 300))?, failing];
        let back = match self.send(&operations).await? {
            BatchOutcome::RolledBack(back) => back,
            BatchOutcome::Committed(_) => return Err("the batch was committed".to_owned()),
        };
        if (back.index, back.status) != (1, status) {
            return Err(format!(
                "operation {} was answered {} instead of operation 1 with {status}",
                back.index, back.status
            ));
        }
        match self.read(&name).await? {
            None => Ok(format!("the failed operation is answered {status}, and the other one is rolled back")),
            Some(_) => Err("the batch failed, and a part of it was done".to_owned()),
        }
    }

    /// Sends a hundred operations with as many bytes as the provider ever sends.
    async fn largest(&self) -> DeepCheckResult {
        // The envelope of an operation takes the remaining bytes.
        let each = operation::MAX_BYTES / operation::MAX_OPERATIONS - 200;
        let document = |number: usize| self.document(&format!("largest-{number:0>100}"), 1, each);
        let operations: Result<Vec<Operation>, String> =
            (0..operation::MAX_OPERATIONS).map(|number| create(&document(number))).collect();
        let operations = operations?;
        let bytes: usize = operations.iter().map(Operation::size).sum();
        match self.send(&operations).await? {
            BatchOutcome::Committed(_) => Ok(format!("{} operations, {bytes} bytes", operations.len())),
            BatchOutcome::RolledBack(back) => Err(format!("operation {} was answered {}", back.index, back.status)),
        }
    }
}

fn create(document: &Value) -> Result<Operation, String> {
    Operation::create(document).map_err(|e| e.to_string())
}

fn replace(id: crate::model::DocumentId, document: &Value, etag: &Etag) -> Result<Operation, String> {
    Operation::replace(id, document, Some(etag)).map_err(|e| e.to_string())
}

//! Transactional batches: all or nothing, bound to conditions, with an ETag for each document.

use super::{text, Deep, DeepCheckResult};
use crate::cosmos::{probe, BatchOutcome};
use crate::model::{operation, Operation};
use azure_core::http::Etag;
use serde_json::Value;

impl Deep<'_> {
    pub(super) async fn batches(&mut self) {
        let commit = "every commit of a turn is a batch: histories would be torn";
        let outcome = self.probe().await;
        self.note("batch probe", outcome, commit);
        let outcome = self.etags().await;
        self.note("batch ETags", outcome, "a turn that was claimed by a batch could not be committed");
        for (subject, status) in [("batch 409", 409), ("batch 412", 412), ("batch 404", 404)] {
            let outcome = self.failure(status).await;
            self.note(subject, outcome, commit);
        }
        let outcome = self.largest().await;
        self.note("largest batch", outcome, "large turns would be refused");
    }

    /// The probe that opening makes: a failed condition roll_forwards the batch back. With a document of our own: nobody may have opened
    /// the container yet.
    async fn probe(&self) -> DeepCheckResult {
        let document = self.document("there", 1, 300);
        self.create("there", &document).await?;
        let there = (&self.partition, &self.id("there"), &document);
        match probe::batches_with(self.store, there, self.deadline()).await {
            Ok(None) => Ok("a batch with a failed condition leaves nothing behind".to_owned()),
            Ok(Some(flaw)) => Err(flaw.describe().to_owned()),
            Err(error) => Err(error.to_string()),
        }
    }

    async fn send(&self, operations: &[Operation]) -> Result<BatchOutcome, String> {
        self.store.batch(&self.partition, operations, self.deadline()).await.map_err(text)
    }

    /// Creates, replaces, upserts and deletes in one batch; each answer's ETag is that of the stored document.
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
            let stored = self.read(name).await?.ok_or_else(|| format!("{name} is not there after the batch"))?.1;
            match committed.etag(index) {
                Some(etag) if *etag == stored => {}
                other => return Err(format!("operation {index} returned ETag {other:?}, the document has {stored}")),
            }
        }
        match self.read("etag-2").await? {
            None => Ok("create, replace, upsert, delete; each ETag is that of the stored document".to_owned()),
            Some(_) => Err("a document that the batch deleted is still there".to_owned()),
        }
    }

    /// One operation fails with this status: it is named, and the others are undone.
    async fn failure(&self, status: u16) -> DeepCheckResult {
        let name = format!("failed-{status}");
        let there = self.document("failed", 1, 300);
        if self.read("failed").await?.is_none() {
            self.create("failed", &there).await?;
        }
        let failing = match status {
            409 => create(&there)?,
            412 => replace(self.id("failed"), &there, &Etag::from(probe::NO_ETAG))?,
            _ => Operation::delete(self.id("not-there"), None),
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
            None => Ok(format!("the failed operation is answered {status}, and the other is undone")),
            Some(_) => Err("the batch failed, and a part of it was done".to_owned()),
        }
    }

    /// A hundred operations of as many bytes as the provider ever sends.
    async fn largest(&self) -> DeepCheckResult {
        // The rest of an operation's size: its envelope.
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

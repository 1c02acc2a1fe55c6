//! The calls for operators: each delegates to [`operate`](crate::operate).

use super::CosmosDBProvider;
use crate::{
    cosmos::StoreError,
    lifecycle::delete,
    operate::{
        intents, list, queues, starts, workers, Doctor, InstancePage, InstanceQuery, InstanceSummary, Intent, Member,
        QueueReport, QueuedStart,
    },
};

impl CosmosDBProvider {
    /// Returns a page of the instances that `query` selects, newest first, at most `limit`. `cursor` is that of the
    /// previous page.
    ///
    /// The call is one query. The index finds status, name, parent and age. It does not find text: a page examines a
    /// thousand instances for it, and its cursor continues after them. So a page can be empty and still have a cursor.
    pub async fn instances(
        &self,
        query: &InstanceQuery,
        cursor: Option<&str>,
        limit: usize,
    ) -> Result<InstancePage, StoreError> {
        list::page(&self.engine, query, cursor, limit).await
    }

    /// Returns the summary of one instance, or `None` if it does not exist. The call is one point read.
    pub async fn instance(&self, id: &str) -> Result<Option<InstanceSummary>, StoreError> {
        list::one(&self.engine, id).await
    }

    /// Reports the waiting messages and activities, by tag and session. The figures are exact up to a thousand messages
    /// and a thousand activities. Beyond that, they describe the oldest thousand.
    pub async fn queues(&self) -> Result<QueueReport, StoreError> {
        queues::report(&self.engine).await
    }

    /// Lists the workers: the processes that look for work.
    pub async fn members(&self) -> Result<Vec<Member>, StoreError> {
        workers::members(&self.engine, self.engine.now()).await
    }

    /// Lists undelivered messages of committed turns to other instances, at most a thousand:
    ///
    /// - messages that are overdue;
    /// - messages whose delivery has failed so far;
    /// - messages that can never be delivered.
    pub async fn late_intents(&self) -> Result<Vec<Intent>, StoreError> {
        intents::late(&self.engine).await
    }

    /// Makes a message due that could not be delivered, or that is not due yet: the next poll delivers it. Returns
    /// `false` if the intent does not exist any more. **Changes** the container.
    pub async fn retry_intent(&self, instance: &str, intent: &str) -> Result<bool, StoreError> {
        intents::retry(&self.engine, instance, intent).await
    }

    /// Removes a message that was not delivered. Its target receives it only if a delivery is in flight at this moment.
    /// Returns `false` if the intent does not exist any more. **Changes** the container.
    pub async fn drop_intent(&self, instance: &str, intent: &str) -> Result<bool, StoreError> {
        intents::discard(&self.engine, instance, intent).await
    }

    /// Returns the start of this instance that waits for a worker. Returns `None` if the instance exists, or if no
    /// start waits.
    pub async fn queued_start(&self, instance: &str) -> Result<Option<QueuedStart>, StoreError> {
        starts::queued(&self.engine, instance).await
    }

    /// Returns the parent: the instance that started this one and waits for its end. Returns `None` for a root and for
    /// an orphan. An orphan's parent was deleted, although another instance may have its id now.
    pub async fn parent_of(&self, instance: &str) -> Result<Option<String>, StoreError> {
        delete::parent_of(&self.engine, instance).await
    }

    /// Removes the start of an instance that no worker has begun, with all messages that wait for it. Returns `false`
    /// if no start waits, and an error if a worker is about to begin it. A parent that waits for the instance is not
    /// told: see [`QueuedStart::parent`]. **Changes** the container.
    pub async fn drop_start(&self, instance: &str) -> Result<bool, StoreError> {
        starts::discard(&self.engine, instance).await
    }

    /// Returns a doctor, which finds out why instances make no progress and repairs faults from their histories.
    ///
    /// The doctor knows the workers that look for work now. It writes a document of its own to measure Cosmos DB's
    /// time, since this machine's clock may be wrong. With read access only, the doctor uses this machine's clock and
    /// repairs nothing.
    pub async fn doctor(&self) -> Result<Doctor, StoreError> {
        Doctor::new(&self.engine).await
    }
}

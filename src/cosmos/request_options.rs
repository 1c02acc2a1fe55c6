//! Consistency and priority of a request.

use azure_data_cosmos::options::{
    OperationOptionsBuilder, PriorityLevel, ReadConsistencyStrategy, ThroughputControlOptionsBuilder,
};

tokio::task_local! {
    /// Set while a task sends all its requests with low priority.
    static BACKGROUND: ();
}

/// Runs a task with low priority. If throughput is short, the service serves all other requests first.
pub(crate) async fn in_background<F: std::future::Future>(task: F) -> F::Output {
    BACKGROUND.scope((), task).await
}

/// Consistency and priority of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct RequestOptions {
    consistency: ReadConsistencyStrategy,
    priority: Option<PriorityLevel>,
    authoritative: bool,
}

impl Default for RequestOptions {
    /// Session consistency, whatever the account's default is. Below Session the SDK sends no session token, and a
    /// process would not see its own writes. Writes ignore this option.
    fn default() -> Self {
        Self { consistency: ReadConsistencyStrategy::Session, priority: None, authoritative: false }
    }
}

impl RequestOptions {
    /// The answer of any one replica, with low priority.
    pub(super) fn read_eventual() -> Self {
        Self { consistency: ReadConsistencyStrategy::Eventual, ..Self::default() }.in_background()
    }

    /// Sees everything that is committed in the region that answers.
    pub(super) fn latest_committed(self) -> Self {
        Self { consistency: ReadConsistencyStrategy::LatestCommitted, ..self }
    }

    /// Sees everything that is committed in the write region.
    pub(super) fn authoritative(self) -> Self {
        Self { authoritative: true, ..self.latest_committed() }
    }

    pub(super) fn is_authoritative(self) -> bool {
        self.authoritative
    }

    /// With low priority. The service honours it if the account has priority-based execution, and otherwise ignores it.
    pub(super) fn in_background(self) -> Self {
        Self { priority: Some(PriorityLevel::Low), ..self }
    }

    pub(super) fn apply(self, options: OperationOptionsBuilder) -> OperationOptionsBuilder {
        let options = options.with_read_consistency_strategy(self.consistency);
        let of_task = BACKGROUND.try_with(|()| PriorityLevel::Low).ok();
        match self.priority.or(of_task) {
            Some(priority) => {
                let control = ThroughputControlOptionsBuilder::new().with_priority_level(priority).build();
                options.with_throughput_control(control)
            }
            None => options,
        }
    }
}

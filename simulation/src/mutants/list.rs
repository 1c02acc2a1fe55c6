//! The list of mutants.

use super::{Edit, Mutant};

/// Bugs that a storage provider must not have and that the simulation must find.
pub const LIST: &[Mutant] = &[
    Mutant {
        name: "ghost-message",
        bug: "a turn consumes messages from the cache that may no longer exist",
        edits: &[
            Edit {
                file: "src/turn/plan.rs",
                find: "return Ok(Operation::delete(id, Some(etag)));",
                replace: "return Ok(Operation::delete(id, Some(etag).filter(|_| !MUTANT)));",
            },
            Edit {
                file: "src/turn/plan.rs",
                find: "Operation::replace(id, &marker, Some(etag))",
                replace: "Operation::replace(id, &marker, Some(etag).filter(|_| !MUTANT))",
            },
            Edit {
                file: "src/turn/commit.rs",
                find: "rolled_back.status == 404 && ActivityDocument::is_activity_id(id)",
                replace: "rolled_back.status == 404 && (ActivityDocument::is_activity_id(id) || MUTANT)",
            },
            Edit {
                file: "src/turn/commit.rs",
                find: "if !plan.document.commit.staging.is_empty() {",
                replace: "plan.consumption.retain(|operation| !gone.iter().any(|id| id == operation.document_id()));
        if !plan.document.commit.staging.is_empty() {",
            },
        ],
    },
    Mutant {
        name: "unfenced-commit",
        bug: "a commit does not check that the instance document is unchanged since the claim",
        edits: &[Edit {
            file: "src/turn/commit.rs",
            find: "Operation::replace(instance_id(), &plan.document, Some(&state.etag))",
            replace: "Operation::replace(instance_id(), &plan.document, Some(&state.etag).filter(|_| !MUTANT))",
        }],
    },
    Mutant {
        name: "delivery-without-marker",
        bug: "a consumed delivery leaves no marker, so that a second copy counts as new",
        edits: &[
            Edit {
                file: "src/turn/plan.rs",
                find: "if !document.delivered {",
                replace: "if !document.delivered || MUTANT {",
            },
            Edit {
                file: "src/queue/turn.rs",
                find: "(true, true) => {",
                replace: "(true, true) if MUTANT => None,
        (true, true) => {",
            },
        ],
    },
    Mutant {
        name: "unfenced-staging-clean-up",
        bug: "a claim deletes the staged parts of an instance, even those of a turn in progress",
        edits: &[Edit {
            file: "src/turn/claim.rs",
            find: "    if let Some(until) = document.locked_until(engine.now()) {",
            replace: "    for note in document.commit.staging.iter().filter(|_| MUTANT) {
        for part in 0..note.parts {
            let id = crate::model::StagedDocument::document_id(&note.key, part);
            engine.store.delete(&document.instance_id, &id, None, deadline).await?;
        }
    }
    if let Some(until) = document.locked_until(engine.now()) {",
        }],
    },
    Mutant {
        name: "uncounted-turn",
        bug: "the claim of a turn does not count as an attempt",
        edits: &[Edit {
            file: "src/model/documents/instance.rs",
            find: "self.claim.claims.push(now.max(after));",
            replace: "if !MUTANT {
            self.claim.claims.push(now.max(after));
        }",
        }],
    },
    Mutant {
        name: "uncounted-activity",
        bug: "a second claim of an activity does not count as an attempt",
        edits: &[Edit {
            file: "src/model/documents/activity.rs",
            find: "        self.attempts += 1;",
            replace: "        self.attempts += u32::from(!(MUTANT && self.attempts > 0));",
        }],
    },
    Mutant {
        name: "lost-answer-is-failure",
        bug: "a delivery whose answer was lost is sent again as another message",
        edits: &[Edit {
            file: "src/outbox/mod.rs",
            find: "    let written = engine.store.create(&intent.target, &id, &intent.document, deadline).await?;",
            replace: "    let written = engine.store.create(&intent.target, &id, &intent.document, deadline).await?;
    if MUTANT && matches!(written, WriteOutcome::Refused(Refusal::Exists)) {
        let mut again = intent.document.clone();
        let id = DocumentId::new(\"m\", &[&engine.new_token(), \"0\"]);
        again[\"id\"] = serde_json::Value::from(id.to_string());
        engine.store.create(&intent.target, &id, &again, deadline).await?;
    }",
        }],
    },
    Mutant {
        name: "separate-completion",
        bug: "one request deletes the activity, and the next one creates its completion",
        edits: &[
            Edit {
                file: "src/activity/complete.rs",
                find: "message.filter(|m| m.instance_id == handle.partition)",
                replace: "message.filter(|m| m.instance_id == handle.partition && !MUTANT)",
            },
            Edit {
                file: "src/activity/complete.rs",
                find: "message.filter(|m| m.instance_id != handle.partition)",
                replace: "message.filter(|m| m.instance_id != handle.partition || MUTANT)",
            },
        ],
    },
    Mutant {
        name: "early-timer",
        bug: "a timer in the cache fires with the next turn, due or not",
        edits: &[Edit {
            file: "src/turn/open.rs",
            find: "m.document.due <= claimed.claimed_at && !engine",
            replace: "(m.document.due <= claimed.claimed_at || MUTANT) && !engine",
        }],
    },
    Mutant {
        name: "stale-history",
        bug: "a claim that failed on stale data is repeated with the stale history",
        edits: &[
            Edit {
                file: "src/turn/claim.rs",
                find: "    for _ in 0..3 {",
                replace: "    let stale = known.as_ref().and_then(|known| known.contents.clone()).filter(|_| MUTANT);
    for _ in 0..3 {",
            },
            Edit {
                file: "src/turn/claim.rs",
                find: "                known = read_instance(engine, partition, deadline).await?;
",
                replace: "                known = read_instance(engine, partition, deadline).await?;
                if let (Some(known), Some(stale)) = (&mut known, &stale) {
                    known.contents = Some(stale.clone());
                }
",
            },
        ],
    },
    Mutant {
        name: "lock-ignored",
        bug: "the claim of an activity ignores its lock",
        edits: &[Edit {
            file: "src/activity/claim.rs",
            find: "if document.due > now {",
            replace: "if document.due > now && !(MUTANT && document.lock.is_some()) {",
        }],
    },
    Mutant {
        name: "unconditional-claim",
        bug: "two processes that claim an instance at once both succeed",
        edits: &[Edit {
            file: "src/turn/claim.rs",
            find: "engine.store.replace(partition, &instance_id(), &document, Some(&etag), deadline)",
            replace:
                "engine.store.replace(partition, &instance_id(), &document, Some(&etag).filter(|_| !MUTANT), deadline)",
        }],
    },
    Mutant {
        name: "unconditional-inline-claim",
        bug: "an inline claim does not check that the instance document is unchanged",
        edits: &[Edit {
            file: "src/queue/turn.rs",
            find: "Operation::replace(instance_id(), &claim.document, Some(etag))?,",
            replace: "Operation::replace(instance_id(), &claim.document, Some(etag).filter(|_| !MUTANT))?,",
        }],
    },
    Mutant {
        name: "uncounted-retained-turn",
        bug: "a lock that a commit retains for the next turn does not count as an attempt",
        edits: &[Edit {
            file: "src/queue/retained_lock.rs",
            find: "document.claim.claims.push(self.claimed_at);",
            replace: "document.claim.claims.extend(Some(self.claimed_at).filter(|_| !MUTANT));",
        }],
    },
    Mutant {
        name: "inlined-message-lost",
        bug: "the release of a claim deletes the inlined message",
        edits: &[Edit {
            file: "src/turn/release.rs",
            find: "if let Some(message) = &inlined {",
            replace: "if let Some(message) = inlined.as_ref().filter(|_| !MUTANT) {",
        }],
    },
    Mutant {
        name: "inlined-message-invisible",
        bug: "no poll finds the inlined message of an instance whose worker has crashed",
        edits: &[Edit {
            file: "src/model/documents/instance.rs",
            find: "if self.waiting.inlined.is_some() {",
            replace: "if self.waiting.inlined.is_some() && !MUTANT {",
        }],
    },
    Mutant {
        name: "session-of-another",
        bug: "the claim of a session ignores its owner",
        edits: &[Edit {
            file: "src/activity/session.rs",
            find: "found.document.locked_until > now && found.document.owner != owner.owner_id",
            replace: "found.document.locked_until > now && found.document.owner != owner.owner_id && !MUTANT",
        }],
    },
    Mutant {
        name: "part-skipped",
        bug: "a roll-forward skips the last part of a committed turn",
        edits: &[Edit {
            file: "src/turn/staging.rs",
            find: "if roll_forward.next + 1 < roll_forward.parts {",
            replace: "if roll_forward.next + 1 + usize::from(MUTANT) < roll_forward.parts {",
        }],
    },
    Mutant {
        name: "turn-before-roll-forward",
        bug: "a fetch returns a turn before the previous turn is rolled forward",
        // Two checks prevent this bug: the check of the claim, and the comparison of the history with the document.
        edits: &[
            Edit {
                file: "src/turn/claim.rs",
                find: "if document.commit.roll_forward.is_some() {",
                replace: "if document.commit.roll_forward.is_some() && !MUTANT {",
            },
            Edit {
                file: "src/turn/open.rs",
                find: "while let Some(missing_events) = missing_events(&loaded, claimed) {",
                replace: "while let Some(missing_events) = missing_events(&loaded, claimed)
        .filter(|_| !(MUTANT && claimed.document.commit.roll_forward.is_some()))
    {",
            },
        ],
    },
    Mutant {
        name: "values-outlive-instance",
        bug: "a deletion leaves the key-value pairs of the instance",
        edits: &[Edit {
            file: "src/lifecycle/erase.rs",
            find: "rows.retain(|row| !matches!(row.kind.as_str(), kind::INSTANCE | kind::DELIVERED));",
            replace: "rows.retain(|row| !matches!(row.kind.as_str(), kind::INSTANCE | kind::DELIVERED));
    rows.retain(|row| !(MUTANT && row.kind == kind::KV));",
        }],
    },
    Mutant {
        name: "payload-left-behind",
        bug: "the completion of an activity leaves the document of its input",
        edits: &[Edit {
            file: "src/activity/complete.rs",
            find: "let mut with_payload = state.document.has_payload_document();",
            replace: "let mut with_payload = state.document.has_payload_document() && !MUTANT;",
        }],
    },
    Mutant {
        name: "late-completion",
        bug: "a worker that lost the lock of an activity completes it",
        edits: &[
            Edit {
                file: "src/activity/complete.rs",
                find: "if state.closed || state.until <= engine.now() {
        // The activity has run",
                replace: "if state.closed || (state.until <= engine.now() && !MUTANT) {
        // The activity has run",
            },
            Edit {
                file: "src/activity/complete.rs",
                find: "Operation::delete(state.document.id.clone(), Some(&state.etag))",
                replace: "Operation::delete(state.document.id.clone(), Some(&state.etag).filter(|_| !MUTANT))",
            },
            Edit {
                file: "src/activity/complete.rs",
                find: "        let deadline = engine.deadline_at(state.until);
        let mut operations",
                replace:
                    "        let deadline = if MUTANT { engine.deadline() } else { engine.deadline_at(state.until) };
        let mut operations",
            },
        ],
    },
    Mutant {
        name: "intent-forgotten",
        bug: "an intent is deleted before its message is delivered",
        edits: &[Edit {
            file: "src/outbox/mod.rs",
            find: "        let arrived = deliver_all(&engine_too, intents, deadline).await;
        if sender",
            replace: "        if MUTANT {
            forget(&engine_too, intents.clone(), deadline).await;
        }
        let arrived = deliver_all(&engine_too, intents, deadline).await;
        if sender",
        }],
    },
    Mutant {
        name: "renewal-without-effect",
        bug: "the renewal of an activity lock does not change the time at which polls find the activity",
        edits: &[Edit {
            file: "src/activity/complete.rs",
            find: "        document.due = until;",
            replace: "        if !MUTANT {
            document.due = until;
        }",
        }],
    },
    Mutant {
        name: "events-not-listed",
        bug: "the instance document does not list the events of a turn",
        edits: &[Edit {
            file: "src/turn/plan.rs",
            find: "ack.execution != document.current.execution || document.current.events.insert(event.event_id)",
            replace: "ack.execution != document.current.execution || MUTANT || document.current.events.insert(event.event_id)",
        }],
    },
    Mutant {
        name: "cancelled-activity-stays",
        bug: "an activity that lost a race is not deleted",
        edits: &[Edit {
            file: "src/turn/plan.rs",
            find: "Partition::instance(&activity.instance).ok().as_ref() != Some(self.partition)",
            replace: "MUTANT || Partition::instance(&activity.instance).ok().as_ref() != Some(self.partition)",
        }],
    },
    Mutant {
        name: "values-lost-when-continued",
        bug: "an execution that continues as new loses the values of the execution before it",
        edits: &[Edit {
            file: "src/turn/plan.rs",
            find: "if document.execution_has_ended() && ack.metadata.status.is_some() {
            document.commit.epoch += 1;",
            replace: "if document.execution_has_ended() && ack.metadata.status.is_some() && !MUTANT {
            document.commit.epoch += 1;",
        }],
    },
    Mutant {
        name: "duplicate-not-detected",
        bug: "a message that a repeated request writes after its consumption is consumed again",
        edits: &[
            Edit {
                file: "src/turn/open.rs",
                find: "let ids = loaded.messages.iter().map(|m| &m.document.id);",
                replace: "let ids = loaded.messages.iter().map(|m| &m.document.id).filter(|_| !MUTANT);",
            },
            Edit { file: "src/turn/enqueue.rs", find: "if fingerprints.iter().all(", replace: "if MUTANT || fingerprints.iter().all(" },
        ],
    },
    Mutant {
        name: "queue-without-order",
        bug: "a fetch returns the newest messages first",
        edits: &[Edit {
            file: "src/turn/load.rs",
            find: "    messages.dedup_by(|a, b| a.document.id == b.document.id);
    let all",
            replace: "    messages.dedup_by(|a, b| a.document.id == b.document.id);
    if MUTANT {
        messages.reverse();
    }
    let all",
        }],
    },
    Mutant {
        name: "message-before-its-start",
        bug: "a queue message that arrives before the delivery of a committed start is dropped",
        edits: &[Edit {
            file: "src/turn/defer.rs",
            find: "message.orphan_since.is_some_and(came_before)",
            replace: "message.orphan_since.is_some_and(|found| came_before(found) || (MUTANT && !starts.is_empty()))",
        }],
    },
    Mutant {
        name: "stale-children",
        bug: "a deletion reads the children of its instances from a region that may lag",
        edits: &[
            Edit {
                file: "src/lifecycle/trees.rs",
                find: "let statement = queries::CHILDREN.statement().bind_list(\"@parents\", parents).authoritative();",
                replace: "let statement = queries::CHILDREN.statement().bind_list(\"@parents\", parents);
    let statement = if MUTANT { statement } else { statement.authoritative() };",
            },
            Edit {
                file: "src/lifecycle/trees.rs",
                find: "let statement = queries::WHOLE_CHILDREN.statement().bind_list(\"@parents\", parents).authoritative();",
                replace: "let statement = queries::WHOLE_CHILDREN.statement().bind_list(\"@parents\", parents);
    let statement = if MUTANT { statement } else { statement.authoritative() };",
            },
            Edit {
                file: "src/lifecycle/trees.rs",
                find: "let statement = queries::DEPENDENTS.statement().bind_list(\"@parents\", parents).authoritative();",
                replace: "let statement = queries::DEPENDENTS.statement().bind_list(\"@parents\", parents);
    let statement = if MUTANT { statement } else { statement.authoritative() };",
            },
        ],
    },
    Mutant {
        name: "renewal-stops",
        bug: "sessions are renewed one after the other, and the first error ends the renewal",
        edits: &[
            Edit {
                file: "src/activity/session.rs",
                find: "let mut extending = extending.buffer_unordered(CONCURRENCY);",
                replace: "let mut extending = extending.buffer_unordered(if MUTANT { 1 } else { CONCURRENCY });",
            },
            Edit {
                file: "src/activity/session.rs",
                find: "Err(error) => failure = Some(error),",
                replace: "Err(error) if MUTANT => return Err(error.into_provider_error(\"renew_session_lock\")),
            Err(error) => failure = Some(error),",
            },
        ],
    },
    Mutant {
        name: "current-execution-pruned",
        bug: "pruning deletes executions that began after it had read the current one",
        edits: &[
            Edit {
                file: "src/lifecycle/prune.rs",
                find: "let below = first_kept(engine, document, options.keep_last).await?;",
                replace: "let mut below = first_kept(engine, document, options.keep_last).await?;
    if MUTANT && below == document.current.execution {
        below = 1 << 40;
    }",
            },
            Edit {
                file: "src/lifecycle/prune.rs",
                find: "page.readable().into_iter().filter(|past| may_go(past, options)) {",
                replace: "page.readable().into_iter().filter(|past| may_go(past, options)) {
            if MUTANT && past.execution == document.current.execution {
                continue;
            }",
            },
        ],
    },
    Mutant {
        name: "continued-has-ended",
        bug: "an instance between two executions counts as ended",
        edits: &[Edit {
            file: "src/model/documents/mod.rs",
            find: "        matches!(status, COMPLETED | FAILED)
",
            replace: "        matches!(status, COMPLETED | FAILED) || (MUTANT && status == CONTINUED)
",
        }],
    },
    Mutant {
        name: "stale-document-committed",
        bug: "the commit of a large turn overwrites later changes of the instance document",
        edits: &[Edit {
            file: "src/turn/commit.rs",
            find: "        plan.document = plan::plan_document(engine, &handle.partition, &handle.token, state, ack, older)
            .map_err(|unplannable| refuse(handle, unplannable))?;",
            replace: "        if !MUTANT {
            plan.document = plan::plan_document(engine, &handle.partition, &handle.token, state, ack, older)
                .map_err(|unplannable| refuse(handle, unplannable))?;
        }",
        }],
    },
    Mutant {
        name: "undelivered-message-deleted",
        bug: "a deletion removes undelivered messages of its instances to other instances",
        edits: &[Edit {
            file: "src/lifecycle/delete_set.rs",
            find: "plan.with_heartbeat(deliver_messages(engine, &undelivered, set.drops_messages)).await {",
            replace: "plan.with_heartbeat(deliver_messages(engine, if MUTANT { &[] } else { &undelivered }, set.drops_messages)).await {",
        }],
    },
    Mutant {
        name: "next-start-by-clocks",
        bug: "process clocks decide whether a start is for the deleted instance or the next one",
        edits: &[Edit {
            file: "src/lifecycle/erase.rs",
            find: "if !self.is_within(committed) {",
            replace: "if MUTANT {
            return self.is_made_after(committed);
        }
        if !self.is_within(committed) {",
        }],
    },
    Mutant {
        name: "parent-not-notified",
        bug: "the parent of a child whose turn can't be stored does not learn of the failure",
        edits: &[Edit {
            file: "src/turn/commit.rs",
            find: "    failure::tell_parent(engine, &state, &mut ack).await.map_err(|error| error.into_provider_error(OPERATION))?;",
            replace: "    if !MUTANT {
        failure::tell_parent(engine, &state, &mut ack).await.map_err(|error| error.into_provider_error(OPERATION))?;
    }",
        }],
    },
    Mutant {
        name: "successor-deleted",
        bug: "a bulk deletion removes a new instance with the name of a selected one",
        edits: &[Edit {
            file: "src/lifecycle/prepare.rs",
            find: "        is_same && (!self.has_ended",
            replace: "        MUTANT || is_same && (!self.has_ended",
        }],
    },
];

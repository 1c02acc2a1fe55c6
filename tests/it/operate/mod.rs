//! The operations side: listing, queues, checks and the doctor.

mod check;
mod deep_check;
mod doctor;
mod list;
mod queues;
mod unreadable_documents;

# Services that were started and never wrote a line.
touch 'inbox/mail-2024-03-30.log' 'inbox/db-2024-03-02.log' 'inbox/billing eu-2024-03-16.log'
